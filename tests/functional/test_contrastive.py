"""The contrastive loss against a double loop in float64."""

import math

import pytest
import torch
from torch.nn import functional as F

from scent_lightning.duals import SCENT
from scent_lightning.errors import InputError
from scent_lightning.functional import (
    Everyone,
    contrastive_log_means,
    contrastive_loss,
    contrastive_scores,
    log_mean_exp,
)
from scent_lightning.functional.contrastive import loss as loss_module
from scent_lightning.functional.contrastive import products

D = 8


def pairs(count, dtype=torch.float64, seed=0, alike=0.7):
    generator = torch.Generator().manual_seed(seed)
    image = F.normalize(torch.randn(count, D, generator=generator, dtype=torch.float64), dim=1)
    text = F.normalize(alike * image + 0.4 * torch.randn(count, D, generator=generator, dtype=torch.float64), dim=1)
    return image.to(dtype).requires_grad_(), text.to(dtype).requires_grad_()


def temperature(tau, dtype=torch.float64):
    return torch.tensor(tau, dtype=dtype, requires_grad=True)


def by_hand(image, text, tau, nu_image, nu_text, rho, epsilon):
    """The definition, one score after the other."""
    count, total = len(image), 0.0
    for i in range(count):
        for anchor, own, others, nu in ((image, text, text, nu_image), (text, image, image, nu_text)):
            scores = [(anchor[i] @ others[j] - anchor[i] @ own[i]) / tau for j in range(count) if j != i]
            weights = sum(torch.exp(score - nu[i]) for score in scores) / len(scores)
            total = total + weights + epsilon * torch.exp(-nu[i]) + nu[i] - 1
    return tau * total / count + 2 * tau * rho


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("tau", [0.01, 0.07, 0.5])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("chunk", [None, 1, 5, 100])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradients(tau, epsilon, chunk, autocast, dtype):
    image, text = pairs(13, dtype)
    tau = temperature(tau, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        means = contrastive_log_means(image, text, tau, epsilon, chunk=chunk)
        generator = torch.Generator().manual_seed(1)
        nu = [log_mean.detach() + 0.3 * torch.randn(13, generator=generator) for log_mean in (means.image, means.text)]
        loss, objective_image, objective_text = contrastive_loss(image, text, tau, means, *nu, rho=0.5, epsilon=epsilon)
    exact = [value.detach().double().requires_grad_() for value in (image, text, tau)]
    expected = by_hand(*exact, *nu, 0.5, epsilon)
    # Scores of 1/τ = 100 amplify float32's rounding of the products.
    tolerance = 1e-11 if dtype == torch.float64 else 5e-5 if tau.item() < 0.05 else 2e-6
    assert relative(loss.detach(), expected.detach()) < tolerance
    found = torch.autograd.grad(loss, (image, text, tau))
    for gradient, direct in zip(found, torch.autograd.grad(expected, exact), strict=True):
        assert gradient.dtype == dtype
        assert relative(gradient, direct) < tolerance
    total = (objective_image + objective_text).mean() * tau.detach() + 2 * tau.detach() * 0.5
    assert relative(total, expected.detach()) < tolerance


@pytest.mark.parametrize("tau", [0.01, 0.07])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("chunk", [None, 4])
def test_log_means_are_those_of_the_scores(tau, epsilon, chunk):
    image, text = pairs(9)
    first, second, mask = contrastive_scores(image, text, tau)
    means = contrastive_log_means(image, text, tau, epsilon, chunk=chunk)
    for found, scores in ((means.image, first), (means.text, second)):
        expected = log_mean_exp(scores, mask)
        if epsilon:
            expected = torch.logaddexp(expected, torch.tensor(math.log(epsilon), dtype=torch.float64))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert means.negatives == 8


def test_texts_far_below_the_largest_row_get_an_exponential_of_their_own():
    """A text that is opposite to every image, at a low temperature, where one exponential for both sides underflows."""
    image, text = (value.detach() for value in pairs(6))
    image[:, 0] = 3.0
    text[:, 0] = 3.0
    text[2] = -text[2]
    image, text = F.normalize(image, dim=1).float(), F.normalize(text, dim=1).float()
    means = contrastive_log_means(image, text, 0.005)
    assert means._columns is None
    first, second, mask = contrastive_scores(image.double(), text.double(), 0.005)
    torch.testing.assert_close(means.text, log_mean_exp(second, mask), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(means.image, log_mean_exp(first, mask), rtol=1e-4, atol=1e-3)
    leaves = [value.double().requires_grad_() for value in (image, text)] + [temperature(0.005)]
    exact = [value.detach().clone().requires_grad_() for value in leaves]
    means = contrastive_log_means(*leaves)
    loss, _, _ = contrastive_loss(*leaves, means, means.image, means.text)
    expected = by_hand(*exact, means.image, means.text, 0.0, 0.0)
    found = torch.autograd.grad(loss, leaves)
    for gradient, direct in zip(found, torch.autograd.grad(expected, exact), strict=True):
        assert relative(gradient, direct) < 1e-9


def test_nu_at_the_log_mean_gives_the_contrastive_loss_over_the_others():
    """BSGD, ε = 0 and a fixed temperature: the gradient is that of mean log mean over j ≠ i."""
    image, text = pairs(11)
    first, second, mask = contrastive_scores(image, text, 0.07)
    filled = [scores.masked_fill(~mask, -torch.inf).logsumexp(dim=1).mean() for scores in (first, second)]
    direct = torch.autograd.grad(0.07 * sum(filled), (image, text))
    means = contrastive_log_means(image, text, 0.07)
    loss, _, _ = contrastive_loss(image, text, 0.07, means, means.image, means.text)
    torch.testing.assert_close(loss, 0.07 * (sum(filled) - 2 * math.log(10)))
    for found, expected in zip(torch.autograd.grad(loss, (image, text)), direct, strict=True):
        torch.testing.assert_close(found, expected)


def test_half_precision_embeddings_get_gradients_of_their_dtype():
    image, text = pairs(7, torch.bfloat16)
    tau = temperature(0.07, torch.float32)
    means = contrastive_log_means(image, text, tau)
    nu = SCENT(5.0).step_from_log_mean(means.image - 1, means.image)
    loss, _, _ = contrastive_loss(image, text, tau, means, nu, means.text)
    assert loss.dtype == torch.float32
    gradients = torch.autograd.grad(loss, (image, text, tau))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16, torch.float32]
    exact = [value.detach().double().requires_grad_() for value in (image, text, tau)]
    direct = torch.autograd.grad(by_hand(*exact, nu, means.text, 0.0, 0.0), exact)
    assert all(relative(found, expected) < 5e-3 for found, expected in zip(gradients, direct, strict=True))


def test_one_pair_is_too_few():
    with pytest.raises(InputError, match="a contrastive loss needs at least 2 pairs, got 1"):
        contrastive_log_means(*pairs(1), 0.1)


def in_one_piece(monkeypatch):
    """Take the GPU's way through the matrix on the CPU."""
    monkeypatch.setattr(products, "_in_one_piece", lambda device, chunk: chunk is None)


def loss_and_gradients(image, text, tau, nu, everyone=None):
    means = contrastive_log_means(image, text, tau, 1e-6, everyone)
    loss, *objectives = contrastive_loss(image, text, tau, means, *nu, rho=0.5, epsilon=1e-6, everyone=everyone)
    return means, loss, objectives, torch.autograd.grad(loss, (image, text, tau))


@pytest.mark.parametrize("tau", [0.01, 0.07, 0.5])
@pytest.mark.parametrize("sides", ["one matrix", "two matrices"])
def test_in_one_piece(tau, sides, monkeypatch):
    """The way of a GPU gives what the way of a CPU gives, which is held to the definition above."""
    image, text = pairs(13)
    tau = temperature(tau)
    nu = torch.randn(2, 13, generator=torch.Generator().manual_seed(1)) - 1
    everyone = None if sides == "one matrix" else Everyone(image, text, 0, 1)
    found = loss_and_gradients(image, text, tau, nu, everyone)
    in_one_piece(monkeypatch)
    expected = loss_and_gradients(image, text, tau, nu, everyone)
    torch.testing.assert_close(found[0].image, expected[0].image)
    torch.testing.assert_close(found[0].text, expected[0].text)
    torch.testing.assert_close(found[1:], expected[1:])


def test_in_one_piece_with_texts_far_below_the_largest_row(monkeypatch):
    in_one_piece(monkeypatch)
    test_texts_far_below_the_largest_row_get_an_exponential_of_their_own()


def assert_half_precision(device):
    image, text = (value.detach().to(device).requires_grad_() for value in pairs(40, torch.bfloat16))
    tau = temperature(0.07, torch.float32).detach().to(device).requires_grad_()
    means = contrastive_log_means(image, text, tau)
    exact = [value.detach().double().cpu().requires_grad_() for value in (image, text, tau)]
    for found, scores in zip((means.image, means.text), contrastive_scores(*exact)[:2], strict=True):
        direct = log_mean_exp(scores, ~torch.eye(40, dtype=torch.bool))
        torch.testing.assert_close(found.double().cpu(), direct, rtol=1e-5, atol=1e-4)  # products are exact
    nu = [means.image.float() - 0.5, means.text.float() + 0.5]
    loss, _, _ = contrastive_loss(image, text, tau, means, *nu)
    gradients = torch.autograd.grad(loss, (image, text, tau))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.bfloat16, torch.float32]
    expected = by_hand(*exact, *(value.double().cpu() for value in nu), 0.0, 0.0)
    assert relative(loss.detach().cpu(), expected.detach()) < 1e-4
    for found, direct in zip(gradients, torch.autograd.grad(expected, exact), strict=True):
        assert relative(found.cpu(), direct) < 1e-2


def test_half_precision_in_one_piece(monkeypatch):
    in_one_piece(monkeypatch)
    monkeypatch.setattr(loss_module, "dtype_of_products", lambda image, chunk: lambda embeddings: embeddings)
    assert_half_precision("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_half_precision_on_a_gpu():
    assert_half_precision("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [None, 5])
def test_value_and_gradients_on_a_gpu(dtype, chunk):
    image, text = (value.detach().cuda().requires_grad_() for value in pairs(13, dtype))
    tau = temperature(0.07, dtype).detach().cuda().requires_grad_()
    means = contrastive_log_means(image, text, tau, 1e-6, chunk=chunk)
    nu = torch.randn(2, 13, generator=torch.Generator().manual_seed(1)).cuda() - 1
    loss, _, _ = contrastive_loss(image, text, tau, means, *nu, rho=0.5, epsilon=1e-6)
    exact = [value.detach().double().cpu().requires_grad_() for value in (image, text, tau)]
    expected = by_hand(*exact, *nu.double().cpu(), 0.5, 1e-6)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-6
    assert relative(loss.detach().cpu(), expected.detach()) < tolerance
    found = torch.autograd.grad(loss, (image, text, tau))
    for gradient, direct in zip(found, torch.autograd.grad(expected, exact), strict=True):
        assert relative(gradient.cpu(), direct) < tolerance

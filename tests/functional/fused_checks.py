"""The fused contrastive loss against float64, on a GPU or in Triton's interpreter: ``test_fused.py`` runs this."""

import math

import pytest
import torch
from torch.nn import functional as F

from scent_lightning.duals import SCENT, ContrastiveSamples, DualVariableMixin, SoftplusASGD
from scent_lightning.functional import (
    Everyone,
    contrastive_log_means,
    contrastive_log_moments,
    contrastive_loss,
    contrastive_scores,
    log_mean_exp,
)
from scent_lightning.functional.contrastive import fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT, WIDTH = 37, 24
GROUPS = {
    "none": None,
    "some": torch.arange(COUNT) // 3 % 9,
    "one has all": torch.zeros(COUNT, dtype=torch.int64),
}
# Products of bfloat16 embeddings are exact but for the order of their sums; weights are rounded to 8 bits.
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


# Several tiles to a row, several programs, and several pieces of the weights, the last of each not full.
SMALL = {"ROWS": 16, "ACROSS": 16, "DEPTH_BYTES": 64, "TILES": 2, "WEIGHTS": 16 * COUNT}


OWN = {name: getattr(fused, name) for name in SMALL}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(fused, name, value)


def pairs(dtype=torch.float32, count=COUNT, seed=0):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    text = 0.5 * image + torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return tuple(F.normalize(e, dim=1).to(DEVICE, dtype).requires_grad_() for e in (image, text))


def relative(found, expected):
    return ((found.cpu().double() - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def objective(image, text, tau, nu, epsilon, group):
    """The definition in float64, from the matrices of scores."""
    *both, mask = contrastive_scores(image, text, tau, group=group)
    number, total = mask.sum(dim=1), 0.0
    for side, scores in enumerate(both):
        shares = torch.exp((scores - nu[side].unsqueeze(1)).masked_fill(~mask, -math.inf))
        mean = shares.sum(dim=1) / number.clamp(min=1)
        values = mean + epsilon * torch.exp(-nu[side]) + nu[side] - 1
        total = total + values[number > 0].sum()
    return tau * total / (number > 0).sum().clamp(min=1) + 2 * tau * 0.5


def assert_right(dtype, tau, group, autocast=False):
    image, text = pairs(dtype)
    low = tau < 0.05
    tau = torch.tensor(tau, device=DEVICE, requires_grad=True)
    here = None if group is None else group.to(DEVICE)
    exact = [value.detach().cpu().double().requires_grad_() for value in (image, text, tau)]
    expected = contrastive_log_means(*exact, 1e-6, group=group)
    generator = torch.Generator().manual_seed(1)
    nu = [
        torch.where(mean == -math.inf, 0.0, mean) + 0.3 * torch.randn(COUNT, generator=generator, dtype=torch.float64)
        for mean in (expected.image, expected.text)
    ]
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        means = contrastive_log_means(image, text, tau, 1e-6, group=here, fused=True)
        loss, *_ = contrastive_loss(image, text, tau, means, *(n.to(DEVICE) for n in nu), rho=0.5, epsilon=1e-6)
    for found, direct in ((means.image, expected.image), (means.text, expected.text)):
        torch.testing.assert_close(found.cpu().double(), direct, rtol=1e-6, atol=2e-5)
    by_hand = objective(*exact, nu, 1e-6, group)
    assert relative(loss.detach(), by_hand.detach()) < 1e-5
    gradients = torch.autograd.grad(loss, (image, text, tau))
    assert [gradient.dtype for gradient in gradients] == [dtype, dtype, torch.float32]
    # Logits of 1/τ = 100 are known to 1e-5 in float32. What the temperature gets is not rounded to bfloat16.
    of_embeddings = max(DTYPES[dtype], 5e-6 if low else 0.0)
    tolerances = [of_embeddings, of_embeddings, 1e-4 if low else 5e-6]
    for found, direct, tolerance in zip(gradients, torch.autograd.grad(by_hand, exact), tolerances, strict=True):
        assert relative(found, direct) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tau", "group"), [(0.01, "none"), (0.07, "some"), (0.5, "one has all"), (0.5, "none")])
def test_value_and_gradients(dtype, tau, group):
    assert_right(dtype, tau, GROUPS[group])


def test_autocast_changes_nothing():
    assert_right(torch.float32, 0.07, None, autocast=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_smaller_than_a_tile(dtype, monkeypatch):
    for name, value in OWN.items():
        monkeypatch.setattr(fused, name, value)
    assert_right(dtype, 0.07, GROUPS["some"])


@pytest.mark.parametrize("kind", ["number", "float64", "bfloat16"])
def test_the_temperature_may_be_a_number_or_of_another_kind(kind):
    image, text = pairs()
    tau = 0.25 if kind == "number" else torch.tensor(0.25, dtype=getattr(torch, kind), device=DEVICE)
    means = contrastive_log_means(image, text, tau, fused=True)
    loss, *_ = contrastive_loss(image, text, tau, means, means.image, means.text)
    expected = contrastive_log_means(*(e.detach().cpu().double() for e in (image, text)), 0.25)
    assert loss.item() == pytest.approx(0.25 * (expected.image + expected.text).mean().item(), rel=1e-5)


def test_groups_and_temperature_may_lie_anywhere():
    """A column of a table, and a number in main memory."""
    image, text = pairs()
    group = torch.stack([GROUPS["some"], torch.zeros(COUNT, dtype=torch.int64)], dim=1).to(DEVICE)[:, 0]
    means = contrastive_log_means(image, text, torch.tensor(0.25), group=group, fused=True)
    expected = contrastive_log_means(*(e.detach().cpu().double() for e in (image, text)), 0.25, group=GROUPS["some"])
    torch.testing.assert_close(means.text.cpu().double(), expected.text, rtol=1e-6, atol=1e-6)


def test_what_is_not_finite_is_not_lost():
    image, text = (e.detach() for e in pairs())
    image[5, 3] = math.nan
    means = contrastive_log_means(image, text, 0.25, fused=True)
    assert torch.isnan(means.image).nonzero().flatten().tolist() == [5]
    assert torch.isnan(means.text).all()  # all have it as a sample, or as their own


def test_a_text_far_below_the_largest_row():
    """Opposite to every image, where one exponential for both sides would underflow."""
    image, text = (value.detach().cpu() for value in pairs())
    image[:, 0] = text[:, 0] = 3.0
    text[2] = -text[2]
    image, text = (F.normalize(e, dim=1).to(DEVICE) for e in (image, text))
    means = contrastive_log_means(image, text, 0.005, fused=True)
    first, second, mask = contrastive_scores(image.cpu().double(), text.cpu().double(), 0.005)
    for found, scores in ((means.image, first), (means.text, second)):
        torch.testing.assert_close(found.cpu().double(), log_mean_exp(scores, mask), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("dtype", "of_text", "group"), [
    (torch.float32, False, "none"),
    (torch.float32, True, "some"),
    (torch.bfloat16, True, "none"),
])  # fmt: skip
def test_moments(dtype, of_text, group):
    image, text = pairs(dtype)
    group = GROUPS[group]
    means = contrastive_log_means(image, text, 0.1, group=None if group is None else group.to(DEVICE), fused=True)
    found = contrastive_log_moments(image, text, 0.1, means, of_text=of_text)
    *scores, mask = contrastive_scores(*(e.detach().cpu().double() for e in (image, text)), 0.1, group=group)
    for power, moment in enumerate(found, start=1):
        expected = log_mean_exp(power * scores[int(of_text)], mask)
        torch.testing.assert_close(moment.cpu().double(), expected, rtol=1e-5, atol=1e-5)


class _Pairs(DualVariableMixin):
    def __init__(self, update):
        super().__init__()
        for name in ("image", "text"):
            self.add_dual(name, 100, update)
        self.to(DEVICE)


@pytest.mark.parametrize("update", [SCENT(2.0), SoftplusASGD(alpha=0.5, rho=1e-3)], ids=repr)
def test_dual_variables_move_as_without(update):
    """An update that needs the scores has them, fused or not."""
    found = []
    for in_tiles in (False, True):
        module, (image, text) = _Pairs(update), pairs()
        tau = torch.tensor(0.1, device=DEVICE, requires_grad=True)
        epsilon = 0.0 if isinstance(update, SoftplusASGD) else 1e-6
        for seed in range(3):
            index = torch.randperm(100, generator=torch.Generator().manual_seed(seed))[:COUNT]
            samples = ContrastiveSamples(image, text, tau, 1.0, epsilon, fused=in_tiles)
            loss = module.entropic_risk(("image", "text"), samples, index.to(DEVICE))
        found.append([loss.detach(), *torch.autograd.grad(loss, (image, text, tau)), module.duals["text"].nu])
    for tiled, whole in zip(*found, strict=True):
        torch.testing.assert_close(tiled, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", ["none", "some"])
def test_shares_of_two_processes_are_as_one(group):
    """What each process works out of its own anchors and everyone's embeddings."""
    group = GROUPS[group]
    group = None if group is None else group.to(DEVICE)
    found: list[list[torch.Tensor]] = []
    for parts in ([slice(0, COUNT)], [slice(0, 20), slice(20, COUNT)]):
        image, text = pairs()
        tau, total = torch.tensor(0.1, device=DEVICE, requires_grad=True), 0.0
        for part in parts:
            everyone = None if len(parts) == 1 else Everyone(image, text, part.start, len(parts), group)
            mine = None if group is None else group[part]
            given = image[part], text[part], tau
            means = contrastive_log_means(*given, 1e-6, everyone, group=mine, fused=True)
            nu = means.image - 0.2, means.text + 0.1
            loss, *_ = contrastive_loss(*given, means, *nu, rho=0.5, epsilon=1e-6, everyone=everyone)
            total = total + loss / len(parts)
        found.append([total.detach(), *torch.autograd.grad(total, (image, text, tau))])
    for together, alone in zip(*reversed(found), strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)


def test_no_pair_is_like_another_at_any_size():
    """One pair more or less than a tile, or a program's tiles, holds."""
    for count in (2, 16, 17, 33):
        image, text = pairs(count=count, seed=count)
        means = contrastive_log_means(image, text, 0.2, fused=True)
        expected = contrastive_log_means(*(e.detach().cpu().double() for e in (image, text)), 0.2)
        torch.testing.assert_close(means.image.cpu().double(), expected.image, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(means.text.cpu().double(), expected.text, rtol=1e-6, atol=1e-6)
        assert math.isfinite(contrastive_loss(image, text, 0.2, means, means.image, means.text)[0].item())

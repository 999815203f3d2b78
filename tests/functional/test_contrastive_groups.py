"""Pairs of one group are no samples of each other: against masked scores in float64."""

from functools import partial

import pytest
import torch

from scent_lightning.duals import BSGD, ContrastiveSamples, DualVariableMixin, SoftplusASGD
from scent_lightning.errors import InputError
from scent_lightning.functional import contrastive_log_means, contrastive_log_moments, contrastive_loss, log_mean_exp
from tests.functional.test_contrastive import pairs, relative, temperature
from tests.helpers import in_two_processes

GROUPS = {
    "pairs of two": torch.arange(13) // 2,
    "one large": torch.tensor([5, 5, 5, 5, 5, 5, 5, 5, -2, -2, 3, 2**40, 0]),
    "by turns": torch.arange(13) % 3,
}


def by_hand(image, text, tau, nu, group, epsilon, rho=0.5):
    """The definition, one score after the other; pairs without a sample are left out."""
    total, rows = 0.0, [i for i in range(len(image)) if (group != group[i]).any()]
    for i in rows:
        for (anchor, own, others), n in zip(((image, text, text), (text, image, image)), nu, strict=True):
            scores = torch.stack(
                [(anchor[i] @ others[j] - anchor[i] @ own[i]) / tau for j in range(len(image)) if group[j] != group[i]]
            )
            total = total + torch.exp(scores - n[i]).mean() + epsilon * torch.exp(-n[i]) + n[i] - 1
    return tau * total / len(rows) + 2 * tau * rho


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("tau", [0.01, 0.07])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_value_and_gradients(name, tau, epsilon, chunk):
    group = GROUPS[name]
    image, text = pairs(13)
    tau = temperature(tau)
    means = contrastive_log_means(image, text, tau, epsilon, chunk=chunk, group=group)
    generator = torch.Generator().manual_seed(1)
    nu = [log_mean + 0.3 * torch.randn(13, generator=generator) for log_mean in (means.image, means.text)]
    loss, *objectives = contrastive_loss(image, text, tau, means, *nu, rho=0.5, epsilon=epsilon)
    exact = [value.detach().requires_grad_() for value in (image, text, tau)]
    expected = by_hand(*exact, nu, group, epsilon)
    assert relative(loss.detach(), expected.detach()) < 1e-11
    found = torch.autograd.grad(loss, (image, text, tau))
    for gradient, direct in zip(found, torch.autograd.grad(expected, exact), strict=True):
        assert relative(gradient, direct) < 1e-10
    total = (objectives[0] + objectives[1]).mean() * tau.detach() + 2 * tau.detach() * 0.5
    assert relative(total, expected.detach()) < 1e-11


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("name", GROUPS)
def test_log_means_counts_and_moments_are_those_of_the_masked_scores(name, chunk):
    group = GROUPS[name]
    image, text = (value.detach() for value in pairs(13))
    means = contrastive_log_means(image, text, 0.07, chunk=chunk, group=group)
    other = group.unsqueeze(1) != group
    assert torch.equal(means.negatives, other.sum(dim=1))
    for of_text, scores in enumerate((image @ text.T, text @ image.T)):
        scores = (scores - scores.diagonal().unsqueeze(1)) / 0.07
        torch.testing.assert_close((means.image, means.text)[of_text], log_mean_exp(scores, other))
        found = contrastive_log_moments(image, text, 0.07, means, of_text=bool(of_text))
        torch.testing.assert_close(found[1], log_mean_exp(2 * scores, other))


@pytest.mark.parametrize("chunk", [None, 4])
def test_each_pair_a_group_is_as_without_groups(chunk):
    image, text = pairs(9, torch.float32)
    found = []
    for group in (None, torch.randperm(9)):
        means = contrastive_log_means(image, text, 0.1, 1e-6, chunk=chunk, group=group)
        loss, *_ = contrastive_loss(image, text, 0.1, means, means.image, means.text, epsilon=1e-6)
        found.append((means.image, means.text, loss, *torch.autograd.grad(loss, (image, text))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


class _Pairs(DualVariableMixin):
    def __init__(self, update):
        super().__init__()
        for name in ("image", "text"):
            self.add_dual(name, 20, update)


@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize(("group", "with_samples"), [
    ([1, 1, 1, 1, 1], []),
    ([4, 4], []),
    ([1, 1, 1, 1, 0], [0, 1, 2, 3, 4]),
])  # fmt: skip
def test_a_pair_without_a_sample_keeps_its_nu_and_adds_nothing(group, with_samples, chunk, epsilon):
    module = _Pairs(BSGD())
    image, text = pairs(len(group))
    samples = ContrastiveSamples(image, text, 0.5, epsilon=epsilon, chunk=chunk, group=torch.tensor(group))
    loss = module.entropic_risk(("image", "text"), samples, torch.arange(len(group)))
    for table in module.duals.values():
        assert table.visited.nonzero().flatten().tolist() == with_samples
    assert loss.isfinite()
    if not with_samples:
        assert loss.item() == 0
        assert not any(gradient.any() for gradient in torch.autograd.grad(loss, (image, text)))


def test_an_update_that_needs_the_scores():
    """The ordinary graph has the same mask."""
    image, text = pairs(6, torch.float32)
    group = torch.tensor([0, 0, 1, 2, 2, 2])
    found = []
    for rho in (1e-4, 1e-8):
        module = _Pairs(SoftplusASGD(alpha=0.5, rho=rho))
        loss = module.entropic_risk(
            ("image", "text"), ContrastiveSamples(image, text, 0.5, group=group), torch.arange(6)
        )
        found.append(loss.item())
    means = contrastive_log_means(image, text, 0.5, group=group)
    assert found[0] == pytest.approx((0.5 * (means.image + means.text).mean()).item(), rel=1e-2)


def _share(rank, chunk, world=2):
    image, text = (value.detach() for value in pairs(13))
    mine = slice(0, 13) if world == 1 else (slice(0, 8), slice(8, 13))[rank]
    image, text = image[mine].requires_grad_(), text[mine].requires_grad_()
    tau = temperature(0.1)
    module, group = _Pairs(BSGD()), GROUPS["one large"][mine]
    samples = ContrastiveSamples(image, text, tau, rho=0.5, chunk=chunk, group=group)
    loss = module.entropic_risk(("image", "text"), samples, torch.arange(13)[mine])
    gradients = [gradient / world for gradient in torch.autograd.grad(loss, (image, text, tau))]
    return loss.item(), *(value.tolist() for value in gradients), module.duals["text"].nu[:13].tolist()


@pytest.mark.parametrize("chunk", [None, 3])
def test_two_processes_are_as_one(chunk, tmp_path):
    """Whatever process the pairs of a group are on; with two, one has the second of a group's two pairs."""
    loss, image, text, tau, nu = _share(0, chunk, world=1)
    first, second = in_two_processes(partial(_share, chunk=chunk), tmp_path)
    assert (first[0] + second[0]) / 2 == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(torch.tensor(first[1] + second[1]), torch.tensor(image), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(first[2] + second[2]), torch.tensor(text), atol=1e-6, rtol=1e-5)
    assert first[3] + second[3] == pytest.approx(tau, rel=1e-5)
    assert first[4] == second[4] == pytest.approx(nu, rel=1e-5)


@pytest.mark.parametrize(("group", "message"), [
    (torch.zeros(3, dtype=torch.int64), r"group must be integers of shape \(4,\), .*, got .* of shape \(3,\)"),
    (torch.zeros(4), r"group must be integers of shape \(4,\), .*, got torch.float32"),
    (torch.zeros(4, 1, dtype=torch.int64), r"group must be integers .* of shape \(4, 1\)"),
])  # fmt: skip
def test_groups_that_do_not_fit(group, message):
    image, text = pairs(4)
    with pytest.raises(InputError, match=message):
        _Pairs(BSGD()).entropic_risk(
            ("image", "text"), ContrastiveSamples(image, text, 0.5, group=group), torch.arange(4)
        )

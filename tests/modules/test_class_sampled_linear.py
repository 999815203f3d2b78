"""The sampled head against a dense softmax written out."""

import pytest
import torch
from torch.nn import functional as F

from scent_lightning.duals import BSGD, SCENT, DenseScores, DualVariable, SoftplusASGD
from scent_lightning.errors import DualDivergenceError, InputError
from scent_lightning.modules import ClassSampledLinear, sampled_scores

K, D, B = 50, 6, 9


def head_of(negatives="in_batch", **arguments):
    head = ClassSampledLinear(D, K, negatives, **arguments)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    return head


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, D, generator=generator), torch.randint(0, K, (B,), generator=generator)


def dense_scores(head, features, labels):
    """Every score h_i·(w_k − w_y), shape (B, K)."""
    rows = head.weight
    if head.normalize:
        features, rows = F.normalize(features, dim=1), F.normalize(rows, dim=1)
    logits = head.scale * features @ rows.T
    return logits - logits[torch.arange(len(labels)), labels].unsqueeze(1)


@pytest.mark.parametrize("options", [{}, {"scale": 3.0}, {"normalize": True, "scale": 20.0}])
@pytest.mark.parametrize("negatives", ["in_batch", "uniform", "all"])
def test_scores_and_gradient_of_the_sampled_classes(batch, negatives, options):
    features, labels = batch
    labels[3] = labels[7]
    head, features = head_of(negatives, num_negatives=20, **options), features.requires_grad_()
    torch.manual_seed(5)
    scores, mask = head(features, labels)
    torch.manual_seed(5)
    drawn = torch.randint(K, (20,))
    columns = {"in_batch": labels.unique(), "uniform": drawn, "all": torch.arange(K)}[negatives]
    expected = dense_scores(head, features, labels)[:, columns]
    torch.testing.assert_close(scores, expected)
    assert torch.equal(mask, columns != labels.unsqueeze(1))
    weights = torch.rand(scores.shape, generator=torch.Generator().manual_seed(2)) * mask
    found = torch.autograd.grad((scores * weights).sum(), (head.weight, features))
    direct = torch.autograd.grad((expected * weights).sum(), (head.weight, features))
    torch.testing.assert_close(found[1], direct[1])
    assert found[0].is_sparse == (negatives != "all")
    if found[0].is_sparse:
        assert found[0].is_coalesced()
        touched = found[0]
        assert set(touched.indices()[0].tolist()) == set(torch.cat([labels, columns]).tolist())
        assert touched.values().shape[0] <= len(labels) + len(columns)
    torch.testing.assert_close(found[0].to_dense(), direct[0])


@pytest.mark.parametrize("negatives", ["in_batch", "uniform"])
def test_autocast_multiplies_in_half_precision_and_keeps_the_gradients_dtype(batch, negatives):
    features, labels = batch
    head, features = head_of(negatives, num_negatives=20), features.requires_grad_()
    grads = []
    for enabled in (False, True):
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            scores, _ = head(features, labels)
        assert scores.dtype == (torch.bfloat16 if enabled else torch.float32)
        grads.append(torch.autograd.grad(scores.float().square().sum(), (head.weight, features)))
    for exact, rounded in zip(*grads, strict=True):
        assert rounded.dtype == torch.float32
        exact, rounded = exact.to_dense(), rounded.to_dense()
        assert (exact - rounded).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"scale": 3.0}, {"normalize": True, "scale": 20.0}])
@pytest.mark.parametrize(
    ("negatives", "at_a_time"), [("in_batch", None), ("all", None), ("all", 1), ("all", 4 * K + 1)]
)
def test_exponentials_are_those_of_the_scores(batch, options, dtype, negatives, at_a_time, monkeypatch):
    """Loss, ν and gradients through the exponentials, against the scores written out in float64."""
    if at_a_time:  # as where there are many logits
        monkeypatch.setattr(sampled_scores, "_FEW_LOGITS", 0)
        monkeypatch.setattr(sampled_scores, "_LOGITS_AT_A_TIME", at_a_time)
    features, labels = batch[0].to(dtype), batch[1]
    labels[3] = labels[7]
    head, index = head_of(negatives=negatives, **options).to(dtype), torch.arange(B) + 2
    ours, exact = (DualVariable(20, SCENT(log_alpha=1.0)) for _ in range(2))
    for variable in (ours, exact):  # some rows have a ν already
        variable.scatter(index[:4], torch.tensor([0.5, -1.0, 2.0, 0.0]))
    features.requires_grad_()
    loss = ours.entropic_risk(head.samples(features, labels), index)
    found = torch.autograd.grad(3 * loss, (head.weight, features))
    head.double()
    wide = features.detach().double().requires_grad_()
    classes = labels.unique() if negatives == "in_batch" else torch.arange(K)
    scores = dense_scores(head, wide, labels)[:, classes]
    direct = exact.entropic_risk(scores, index, classes != labels.unsqueeze(1))
    expected = torch.autograd.grad(3 * direct, (head.weight, wide))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(loss.double(), direct, **tolerance)
    torch.testing.assert_close(ours.nu, exact.nu)
    assert found[0].dtype == found[1].dtype == dtype
    assert found[0].is_sparse == (negatives == "in_batch")
    if negatives == "in_batch":
        assert found[0].is_coalesced()
        assert found[0].indices()[0].tolist() == classes.tolist()
    torch.testing.assert_close(found[0].to_dense().double(), expected[0], **tolerance)
    torch.testing.assert_close(found[1].double(), expected[1], **tolerance)


@pytest.mark.parametrize("negatives", ["in_batch", "all"])
def test_classes_that_are_far_below_the_largest_get_no_gradient(negatives, monkeypatch):
    monkeypatch.setattr(sampled_scores, "_FEW_LOGITS", 0)
    head, variable = head_of(negatives=negatives), DualVariable(3, BSGD())
    with torch.no_grad():
        head.weight.copy_(torch.arange(K).unsqueeze(1) * torch.eye(1, D))
    features, labels = torch.eye(1, D).repeat(3, 1) * 150, torch.tensor([K - 1, K - 2, K - 3])
    loss = variable.entropic_risk(head.samples(features, labels), torch.arange(3))
    gradient = torch.autograd.grad(loss, head.weight)[0].to_dense()
    # Only the two largest logits count, and the rest are e^-150 of them or less.
    assert not gradient[: K - 3].any()
    torch.testing.assert_close(gradient[K - 3 :, 0], torch.tensor([-50.0, 0.0, 50.0]), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("negatives", ["in_batch", "all"])
def test_exponentials_of_a_product_in_half_precision(batch, negatives):
    features, labels = batch
    grads = []
    for enabled in (False, True):
        head, variable = head_of(negatives=negatives), DualVariable(B, BSGD())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            samples = head.samples(features, labels)
            loss = variable.entropic_risk(samples, torch.arange(B))
        assert loss.dtype == samples.mean.dtype == torch.float32
        loss.backward()
        grads.append(head.weight.grad.to_dense())
    assert grads[1].dtype == torch.float32
    assert 0 < (grads[0] - grads[1]).norm() < 0.02 * grads[0].norm()


def test_exponentials_with_the_labels_of_all_processes(batch):
    """A batch in two halves has the sums of the whole, and gradients that add up to it."""
    features, labels = batch
    whole, parts = head_of(), head_of()
    every = whole.samples(features, labels)
    every.with_gradient(torch.zeros(()), torch.ones(B)).backward()
    for part in (slice(0, 4), slice(4, B)):
        samples = parts.samples(features[part], labels[part], labels)
        torch.testing.assert_close(samples.largest, every.largest[part])
        torch.testing.assert_close(samples.mean, every.mean[part])
        assert samples.counts == every.counts == len(labels.unique()) - 1
        samples.with_gradient(torch.zeros(()), torch.ones(part.stop - part.start)).backward()
    torch.testing.assert_close(parts.weight.grad.to_dense(), whole.weight.grad.to_dense())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("negatives", ["in_batch", "all"])
def test_a_class_whose_row_is_not_finite_is_found(bad, negatives, monkeypatch):
    monkeypatch.setattr(sampled_scores, "_FEW_LOGITS", 0 if negatives == "all" else 2**16)
    head, variable = head_of(negatives=negatives), DualVariable(10, SCENT(log_alpha=0.0))
    with torch.no_grad():
        head.weight[7, 0] = bad
    samples = head.samples(torch.ones(3, D), torch.tensor([7, 8, 9]))
    with pytest.raises(DualDivergenceError, match="scores are not finite"):
        variable.entropic_risk(samples, torch.tensor([1, 2, 3]))
    assert not variable.visited.any()


@pytest.mark.parametrize("negatives", ["in_batch", "all"])
def test_an_update_that_needs_the_scores_gets_them(batch, negatives):
    features, labels = batch
    head, index = head_of(negatives=negatives), torch.arange(B)
    found = []
    for scores in (head.samples(features, labels), DenseScores(*head(features, labels))):
        variable = DualVariable(20, SoftplusASGD(alpha=0.1, rho=1e-3))
        loss = variable.entropic_risk(scores, index)
        found.append((loss.item(), variable.nu, torch.autograd.grad(loss, head.weight)[0].to_dense()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_samples_go_with_an_index_of_their_length_and_without_a_mask(batch):
    samples = head_of().samples(*batch)
    variable = DualVariable(20, BSGD())
    with pytest.raises(ValueError, match=r"must have shape \(9,\)"):
        variable.entropic_risk(samples, torch.arange(3))
    with pytest.raises(InputError, match="mask goes with a tensor of scores; Exponentials says itself"):
        variable.entropic_risk(samples, torch.arange(B), torch.ones(B, 3, dtype=torch.bool))
    assert not variable.visited.any()


def test_batch_of_one_class_has_no_negative():
    features, labels = torch.randn(3, D), torch.tensor([4, 4, 4])
    scores, mask = head_of()(features, labels)
    assert scores.shape == (3, 1)
    assert not mask.any()
    samples = head_of().samples(features, labels)
    assert isinstance(samples, DenseScores)
    assert not samples.mask.any()


def test_logits_in_chunks(batch):
    head = head_of(scale=2.0)
    whole = head.logits(batch[0])
    torch.testing.assert_close(torch.cat([head.logits(batch[0], 0, 30), head.logits(batch[0], 30, 60)], dim=1), whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 1}, "num_classes must be an integer of at least 2, got 1"),
        ({"num_features": 0}, "num_features must be an integer of at least 1"),
        ({"num_negatives": 0}, "num_negatives must be"),
        ({"negatives": "some"}, "negatives must be one of in_batch, uniform, all, got 'some'"),
        ({"scale": 0.0}, "scale must be a finite number above 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        ClassSampledLinear(**{"num_features": D, "num_classes": K, **arguments})

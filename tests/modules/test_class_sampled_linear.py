"""The sampled head against a dense softmax written out."""

import pytest
import torch
from torch.nn import functional as F

from scent_lightning.errors import InputError
from scent_lightning.modules import ClassSampledLinear

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


def test_batch_of_one_class_has_no_negative():
    scores, mask = head_of()(torch.randn(3, D), torch.tensor([4, 4, 4]))
    assert scores.shape == (3, 1)
    assert not mask.any()


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

"""Several right classes: the expectation over all batches, and the single-label head as a special case."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from scent_lightning.functional import log_mean_exp
from scent_lightning.modules import ClassSampledLinear
from scent_lightning.modules.several_answers import Answers, answer_scores, cross_entropy_and_most_probable

K, D = 9, 4
# Of eight rows, with a frequent class and a class of one row; class 8 has none.
ANSWERS = torch.tensor(
    [[0, -1, -1], [0, 1, -1], [0, 2, 3], [4, -1, -1], [0, 5, -1], [6, 1, -1], [7, 0, 2], [0, -1, -1]]
)
WEIGHTS = torch.rand(ANSWERS.shape, generator=torch.Generator().manual_seed(5)) + 0.1
N = len(ANSWERS)


def head_of(**arguments):
    head = ClassSampledLinear(D, K, **arguments)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    head = head.double()
    counts = torch.bincount(ANSWERS[ANSWERS >= 0], minlength=K)
    head.frequencies.give(counts, rows=N)
    return head


FEATURES = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def exact(head, rows, missing=()):
    """Cross-entropy of rows over all classes but those that no batch has."""
    logits = head.logits(FEATURES[rows])
    weights = WEIGHTS[rows].double() * (ANSWERS[rows] >= 0)
    shares = weights / weights.sum(dim=1, keepdim=True)
    own = (shares * logits.gather(1, ANSWERS[rows].clamp(min=0))).sum(dim=1)
    logits = logits.clone()
    logits[:, list(missing)] = -math.inf
    return logits.logsumexp(1) - own


def scores_of(head, rows, **arguments):
    rows = torch.as_tensor(rows)
    classes = ANSWERS[rows]
    of_batch = classes[classes >= 0]
    return answer_scores(head, FEATURES[rows], Answers(classes, WEIGHTS[rows]), of_batch, len(rows), **arguments)


@pytest.mark.parametrize("options", [{}, {"normalize": True, "scale": 3.0}])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_over_all_batches_the_mean_is_that_over_all_classes(options, size):
    """Every batch of that size; a class is a negative where another row of the batch has it and the row does not."""
    head = head_of(correction="frequency", **options)
    sums, number = torch.zeros(N, dtype=torch.float64), torch.zeros(N)
    for rows in itertools.combinations(range(N), size):
        samples = scores_of(head, rows)
        sums[list(rows)] += log_mean_exp(samples.values.detach(), samples.mask).exp() * (K - 1)
        number[list(rows)] += 1
    torch.testing.assert_close(sums / number, exact(head, range(N), missing=[8]).exp().detach(), rtol=1e-6, atol=0)


def test_over_all_draws_the_mean_is_that_over_all_classes(monkeypatch):
    head = head_of(negatives="uniform", num_negatives=2)
    rows, sums = list(range(N)), torch.zeros(N, dtype=torch.float64)
    for drawn in itertools.product(range(K), repeat=2):
        monkeypatch.setattr(torch, "randint", lambda *_, drawn=drawn, **__: torch.tensor(drawn))
        samples = scores_of(head, rows)
        sums += log_mean_exp(samples.values.detach(), samples.mask).exp() * (K - 1) / K**2
    torch.testing.assert_close(sums, exact(head, rows).exp().detach(), rtol=1e-6, atol=0)


# Of each row: none that is right, one that no batch has, some that several batches have, and rows without.
HARD = torch.tensor([[2, 8], [4, -1], [-1, -1], [0, 1], [8, 4], [0, 5], [1, 3], [6, -1]])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_hard_negatives_leave_the_mean_over_all_batches(size):
    """They are in the sum for sure, and not once more where another row of the batch has them."""
    head = head_of(correction="frequency")
    sums, number = torch.zeros(N, dtype=torch.float64), torch.zeros(N)
    for rows in map(list, itertools.combinations(range(N), size)):
        classes = ANSWERS[rows]
        answers = Answers(classes, WEIGHTS[rows], HARD[rows])
        samples = answer_scores(head, FEATURES[rows], answers, classes[classes >= 0], size)
        sums[rows] += log_mean_exp(samples.values.detach(), samples.mask).exp() * (K - 1)
        number[rows] += 1
    for row in range(N):  # class 8 is in no batch, and in the sum of those rows alone that have it for sure
        expected = exact(head, [row], missing=[] if 8 in HARD[row] else [8]).exp().item()
        assert (sums / number)[row].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"normalize": True, "scale": 3.0}])
def test_hard_negatives_leave_the_mean_over_all_draws(options, monkeypatch):
    head = head_of(negatives="uniform", num_negatives=2, **options)
    sums = torch.zeros(N, dtype=torch.float64)
    for drawn in itertools.product(range(K), repeat=2):
        monkeypatch.setattr(torch, "randint", lambda *_, drawn=drawn, **__: torch.tensor(drawn))
        samples = answer_scores(head, FEATURES, Answers(ANSWERS, WEIGHTS, HARD), ANSWERS[ANSWERS >= 0], N)
        sums += log_mean_exp(samples.values.detach(), samples.mask).exp() * (K - 1) / K**2
    torch.testing.assert_close(sums, exact(head, range(N)).exp().detach(), rtol=1e-6, atol=0)


def test_hard_negatives_of_all_classes_change_nothing():
    head = head_of(negatives="all")
    one, other = (
        answer_scores(head, FEATURES, Answers(ANSWERS, WEIGHTS, hard), ANSWERS[ANSWERS >= 0], N)
        for hard in (None, HARD)
    )
    torch.testing.assert_close(log_mean_exp(one.values, one.mask), log_mean_exp(other.values, other.mask))


@pytest.mark.parametrize("options", [{}, {"normalize": True, "scale": 3.0}])
def test_all_classes_give_the_cross_entropy_and_its_gradient(options):
    head = head_of(negatives="all", **options)
    samples = scores_of(head, range(N))
    found = samples.values.masked_fill(~samples.mask, -math.inf).logsumexp(1) - samples.mask.sum(1).log()
    expected = exact(head, range(N))
    torch.testing.assert_close(found + math.log(K - 1), expected)
    (one,) = torch.autograd.grad(found.sum(), head.weight)
    (other,) = torch.autograd.grad(expected.sum(), head.weight)
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [{}, {"normalize": True, "scale": 3.0}])
@pytest.mark.parametrize("correction", ["frequency", "none"])
@pytest.mark.parametrize("hard", [None, HARD[:4]])
def test_the_gradient_is_sparse_and_right(options, correction, hard):
    """Against finite differences."""
    head = head_of(correction=correction, **options)
    features = FEATURES[:4].clone().requires_grad_()
    classes = ANSWERS[:4]

    def loss(head, features):
        samples = answer_scores(head, features, Answers(classes, hard=hard), classes[classes >= 0], 4)
        return samples.values.masked_fill(~samples.mask, -math.inf).exp().sum()

    loss(head, features).backward()
    sparse = head.weight.grad
    assert sparse.is_sparse
    assert sparse.coalesce().indices()[0].tolist() == [0, 1, 2, 3, 4, *([] if hard is None else [8])]
    for parameter, found in ((head.weight, sparse.to_dense()), (features, features.grad)):
        step = torch.randn(parameter.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 1e-6
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step
                values.append(loss(head, features).item())
                parameter -= sign * step
        assert (found * step).sum().item() == pytest.approx((values[0] - values[1]) / 2, rel=1e-5)


@pytest.mark.parametrize("correction", ["frequency", "none"])
@pytest.mark.parametrize("negatives", ["in_batch", "all"])
def test_one_right_class_is_the_head_of_single_labels_with_its_target(correction, negatives):
    labels = torch.tensor([0, 3, 3, 7, 1])
    head = head_of(correction=correction, negatives=negatives, include_target=True)
    if correction == "frequency":
        head.frequencies.give(torch.tensor([3, 2, 4, 5, 2, 1, 1, 3, 2]))
    several = answer_scores(head, FEATURES[:5], Answers(labels.unsqueeze(1)), labels, 5)
    single = head.samples(FEATURES[:5], labels).dense()
    torch.testing.assert_close(
        log_mean_exp(several.values.detach(), several.mask), log_mean_exp(single.values.detach(), single.mask)
    )


def test_without_a_right_class_there_is_no_sample():
    head = head_of()
    none = torch.full((2, 3), -1)
    assert not answer_scores(head, FEATURES[:2], Answers(none), none[:0, 0], 2).mask.any()
    assert not answer_scores(head, FEATURES[:2], Answers(none[:, :0]), none[:0, 0], 2).mask.any()


@pytest.mark.parametrize("chunk", [2, 9, 100])
@pytest.mark.parametrize("options", [{}, {"normalize": True, "scale": 3.0}])
def test_evaluation_in_chunks_is_exact(chunk, options):
    head = head_of(**options)
    answers = torch.cat([ANSWERS, torch.full((1, 3), -1)])
    features, weights = torch.cat([FEATURES, FEATURES[:1]]), torch.cat([WEIGHTS, WEIGHTS[:1]])
    with torch.no_grad():
        losses, found = cross_entropy_and_most_probable(head, features, Answers(answers, weights), 4, chunk)
        torch.testing.assert_close(losses[:-1], exact(head, range(N)))
        assert losses[-1].isnan()
        values, classes = F.softmax(head.logits(features), dim=1).topk(4, dim=1)
        assert torch.equal(found.classes, classes)
        torch.testing.assert_close(found.probabilities, values)

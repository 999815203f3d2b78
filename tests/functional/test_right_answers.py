"""Scores of rows with several right answers, against the cross-entropy in float64."""

import itertools
import math

import numpy as np
import pytest
import torch

from scent_lightning.functional import list_scores, log_mean_exp, padded_answers, scores_of_answers, shares_of

K = 7
ANSWERS = torch.tensor([[2, -1, -1], [0, 5, 6], [-1, -1, -1], [4, 1, -1]])
WEIGHTS = torch.tensor([[3.0, 9.0, 9.0], [1.0, 2.0, 0.5], [1.0, 1.0, 1.0], [1.0, 0.0, 7.0]], dtype=torch.float64)


def logits_of():
    return torch.randn(len(ANSWERS), K, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def own(logits, answers=ANSWERS):
    return logits.gather(1, answers.clamp(min=0))


def with_gradient(scores, mask):
    """Log-mean-exp of the rows with a right answer, by torch."""
    rows = mask.any(dim=1)
    return scores.masked_fill(~mask, -math.inf)[rows].logsumexp(1) - mask.sum(1)[rows].log()


def cross_entropy(logits, answers, weights):
    """Row by row, NaN where there is no right answer."""
    found = []
    for row, right, weight in zip(logits, answers, weights, strict=True):
        right, weight = right[right >= 0], weight[right >= 0]
        found.append(row.logsumexp(0) - (weight / weight.sum()) @ row[right] if len(right) else torch.tensor(math.nan))
    return torch.stack([value.double() for value in found])


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("total", [1.0, K - 1.0])
def test_all_classes_give_the_cross_entropy(weights, total):
    logits = logits_of()
    scores, mask = scores_of_answers(logits, torch.arange(K), own(logits), ANSWERS, weights, total=total)
    expected = cross_entropy(logits, ANSWERS, torch.ones_like(WEIGHTS) if weights is None else weights)
    rows = [0, 1, 3]
    assert not mask[2].any()
    torch.testing.assert_close(log_mean_exp(scores, mask)[rows] + math.log(total), expected[rows])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("repeats", [False, True])
def test_over_all_samples_the_mean_is_the_sum_over_all_classes(size, repeats):
    """Every sample of that size, by its probability: the exponential of the estimate has the right expectation."""
    logits = logits_of()
    samples = list((itertools.product if repeats else itertools.permutations)(range(K), **sizes(repeats, size)))
    offset = torch.full((size,), -math.log(size / K), dtype=torch.float64)  # how often a class is expected there
    total = torch.zeros(len(ANSWERS), dtype=torch.float64)
    for sample in samples:
        columns = torch.tensor(sample)
        scores, mask = scores_of_answers(logits[:, columns], columns, own(logits), ANSWERS, WEIGHTS, offset)
        total += log_mean_exp(scores, mask).exp() / len(samples)
    expected = cross_entropy(logits, ANSWERS, WEIGHTS).exp()
    torch.testing.assert_close(total[[0, 1, 3]], expected[[0, 1, 3]], rtol=1e-12, atol=0)


def sizes(repeats, size):
    return {"repeat": size} if repeats else {"r": size}


def test_a_right_answer_is_never_a_negative():
    """Its columns count nothing however often they are drawn, whatever their offset says."""
    logits = logits_of()
    columns = torch.tensor([5, 0, 5, 3])
    few, mask = scores_of_answers(logits[:, columns], columns, own(logits), ANSWERS, WEIGHTS, torch.full((4,), 100.0))
    assert mask[:, :4].tolist() == [
        [True, True, True, True],
        [False, False, False, True],
        [False] * 4,
        [True, True, True, True],
    ]
    assert mask[:, 4:].tolist() == (ANSWERS >= 0).tolist()
    only, _ = scores_of_answers(logits[1:2, [3]], torch.tensor([3]), own(logits)[1:2], ANSWERS[1:2], WEIGHTS[1:2])
    # The same terms, whose number is in each of them.
    torch.testing.assert_close(few[1, 4:], only[0, 1:])


def test_gradient_is_that_of_the_cross_entropy():
    logits = logits_of().requires_grad_()
    scores, mask = scores_of_answers(logits, torch.arange(K), own(logits), ANSWERS, WEIGHTS)
    (found,) = torch.autograd.grad(with_gradient(scores, mask).sum(), logits)
    (expected,) = torch.autograd.grad(cross_entropy(logits, ANSWERS, WEIGHTS)[[0, 1, 3]].sum(), logits)
    torch.testing.assert_close(found, expected)
    ones = torch.ones(len(ANSWERS), K, dtype=torch.float64)

    def sampled(values):
        scores, mask = scores_of_answers(
            values[:, [1, 3]], torch.tensor([1, 3]), own(values), ANSWERS, WEIGHTS, ones[0, :2]
        )
        return with_gradient(scores, mask)

    assert torch.autograd.gradcheck(sampled, logits)


def test_one_right_answer_is_the_softmax_with_the_target():
    """Scores less those of the target, and the target's own, 0, as one more term."""
    logits = logits_of()
    labels = torch.tensor([2, 0, 3, 4])
    columns = torch.tensor([0, 2, 6])
    scores, mask = scores_of_answers(logits[:, columns], columns, logits.gather(1, labels[:, None]), labels[:, None])
    others = (logits[:, columns] - logits.gather(1, labels[:, None])).masked_fill(columns == labels[:, None], -math.inf)
    torch.testing.assert_close(log_mean_exp(scores, mask), torch.cat([others, torch.zeros(4, 1)], 1).logsumexp(1))


def test_csr_to_a_padded_matrix():
    offsets, classes = torch.tensor([3, 4, 7, 7, 9]), torch.tensor([9, 9, 9, 2, 0, 5, 6, 4, 1, 9])
    answers, weights = padded_answers(offsets, classes, torch.arange(10.0))
    assert answers.tolist() == ANSWERS.tolist()
    assert weights.tolist() == [[3, 0, 0], [4, 5, 6], [0, 0, 0], [7, 8, 0]]
    empty, none = padded_answers(torch.zeros(3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert empty.shape == (2, 0)
    assert none is None


def test_shares_of_a_row_of_zeros_are_zeros():
    assert shares_of(torch.tensor([[1.0, 3.0], [0.0, 0.0]])).tolist() == [[0.25, 0.75], [0.0, 0.0]]


def test_lists_give_their_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5, dtype=torch.float64, generator=generator)
    weights = torch.tensor([[3.0, 0, 1, 0, 0], [0, 7, 0, 0, 99], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    logits[1, 4] = math.inf  # where there is no document anything may be
    scores, valid = list_scores(logits, weights, mask)
    for row in (0, 1, 3):
        values, share = logits[row][mask[row]], weights[row][mask[row]].double()
        assert log_mean_exp(scores, valid)[row].item() == pytest.approx(
            (values.logsumexp(0) - share / share.sum() @ values).item(), rel=1e-12
        )
    assert not valid[2].any()


def test_counts_of_documents_weigh_the_sum():
    logits = torch.log(torch.tensor([[2.0, 3.0, 5.0]]))
    scores, valid = list_scores(logits, torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[1.0, 4.0, 0.0]]))
    assert log_mean_exp(scores, valid).exp().item() == pytest.approx((2 + 4 * 3) / 2)
    assert np.isfinite(scores.numpy()).all()

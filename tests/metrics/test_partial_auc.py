"""ROC curve, partial areas and training objective against their definitions over pairs, and against scikit-learn."""

import math
import warnings
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from scent_lightning.errors import InputError
from scent_lightning.functional import roc as module
from scent_lightning.metrics import OneWayPartialAUC, PartialAUCObjective, TwoWayPartialAUC
from scent_lightning.metrics.partial_auc import (
    partial_auc,
    partial_auc_objective,
    roc_curve,
    two_way_partial_auc,
)
from tests.helpers import in_two_processes

MAX_FPRS = (0.05, 0.3, 0.5, 1.0)
SURROGATE_LOSSES = {
    "squared_hinge": lambda d, c: max(0.0, c + d) ** 2,
    "squared": lambda d, c: (c + d) ** 2,
    "hinge": lambda d, c: max(0.0, c + d),
    "logistic": lambda d, c: max(d, 0.0) + math.log1p(math.exp(-abs(d))),
}


def exact_curve(scores, labels):
    """The curve's points by definition: for each threshold the fraction of each class at or above it."""
    positive = [s for s, y in zip(scores, labels, strict=True) if y]
    negative = [s for s, y in zip(scores, labels, strict=True) if not y]
    points = [(Fraction(0), Fraction(0))]
    for threshold in sorted(set(scores), reverse=True):
        above = [sum(s >= threshold for s in values) for values in (negative, positive)]
        points.append((Fraction(above[0], len(negative)), Fraction(above[1], len(positive))))
    return points


def exact_area(points, min_tpr, max_fpr):
    """Integral of max(TPR − min_tpr, 0) up to max_fpr, by cutting the curve at both lines and summing trapezoids."""
    min_tpr, max_fpr = Fraction(min_tpr), Fraction(max_fpr)
    cut = [points[0]]
    for (x0, y0), (x1, y1) in pairwise(points):
        inner = []
        if x0 < max_fpr < x1:
            inner.append((max_fpr, y0 + (y1 - y0) * (max_fpr - x0) / (x1 - x0)))
        if y0 < min_tpr < y1:
            inner.append((x0 + (x1 - x0) * (min_tpr - y0) / (y1 - y0), min_tpr))
        cut += [*sorted(inner), (x1, y1)]
    area = Fraction(0)
    for (x0, y0), (x1, y1) in pairwise(cut):
        if x1 <= max_fpr:
            area += (x1 - x0) * (max(y0 - min_tpr, 0) + max(y1 - min_tpr, 0)) / 2
    return area


def data(seed=0, rows=400, levels=None, scale=1.0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(rows, generator=generator) < 0.3).long()
    labels[:2] = torch.tensor([0, 1])
    scores = torch.randn(rows, generator=generator, dtype=torch.float64) + 0.8 * labels
    if levels is not None:
        scores = (scores * levels).round() / levels
    return scale * scores + shift, labels


few_rows = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=2, max_size=14).filter(
    lambda rows: len({label for _, label in rows}) == 2
)


@settings(deadline=None, max_examples=150)
@given(few_rows, st.integers(1, 20), st.integers(0, 19))
def test_curve_and_areas_equal_their_definition_in_fractions(rows, max_fpr, min_tpr):
    scores, labels = [score for score, _ in rows], [int(label) for _, label in rows]
    points = exact_curve(scores, labels)
    tensors = torch.tensor(scores) * 1000.0, torch.tensor(labels)
    fpr, tpr = roc_curve(*tensors)
    assert fpr.dtype == tpr.dtype == torch.float64
    assert fpr.tolist() == [float(x) for x, _ in points]
    assert tpr.tolist() == [float(y) for _, y in points]
    max_fpr, min_tpr = Fraction(max_fpr, 20), Fraction(min_tpr, 20)
    one_way = partial_auc(*tensors, float(max_fpr)).item()
    assert one_way == pytest.approx(float(exact_area(points, 0, max_fpr)), abs=1e-12)
    two_way = two_way_partial_auc(*tensors, float(min_tpr), float(max_fpr)).item()
    expected = exact_area(points, min_tpr, max_fpr) / ((1 - min_tpr) * max_fpr)
    assert two_way == pytest.approx(float(expected), abs=1e-12)
    assert -1e-12 <= two_way <= 1 + 1e-12


@settings(deadline=None, max_examples=100)
@given(few_rows)
def test_whole_area_is_the_fraction_of_pairs_in_order(rows):
    pairs = [(p > n) + (p == n) / 2 for p, positive in rows for n, other in rows if positive and not other]
    scores, labels = torch.tensor([s for s, _ in rows]), torch.tensor([y for _, y in rows])
    assert partial_auc(scores, labels, 1.0).item() == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)
    assert two_way_partial_auc(scores, labels, 0.0, 1.0).item() == pytest.approx(sum(pairs) / len(pairs), abs=1e-12)


@pytest.mark.parametrize("levels", [None, 1, 4])
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e4, -3e4), (1e-7, 1e4), (1e30, 0.0)])
@pytest.mark.parametrize("max_fpr", MAX_FPRS)
def test_agrees_with_scikit_learn(levels, scale, shift, max_fpr):
    for seed in range(3):
        scores, labels = data(seed, levels=levels, scale=scale, shift=shift)
        expected = roc_auc_score(labels.numpy(), scores.numpy(), max_fpr=max_fpr)
        metric = OneWayPartialAUC(max_fpr, standardized=True)
        metric.update(scores, labels)
        assert metric.compute().item() == pytest.approx(expected, abs=1e-9)
        raw = OneWayPartialAUC(max_fpr)
        raw.update(scores, labels)
        if max_fpr < 1:
            chance = max_fpr**2 / 2
            expected = (2 * expected - 1) * (max_fpr - chance) + chance
        assert raw.compute().item() == pytest.approx(expected, abs=1e-9)


def test_scores_that_a_sigmoid_would_tie_stay_apart():
    scores, labels = torch.tensor([1e4 + 3, 1e4 + 2, -1e4 + 1, -1e4]), torch.tensor([1, 0, 1, 0])
    assert partial_auc(scores, labels, 1.0).item() == 0.75
    assert partial_auc(torch.tensor([math.inf, 1e38, -math.inf]), torch.tensor([1, 0, 0]), 0.5).item() == 0.5


def test_a_segment_that_crosses_both_lines():
    # One tie: the curve is the diagonal, above TPR 0.5 from FPR 0.5 on.
    scores, labels = torch.zeros(4), torch.tensor([0, 1, 0, 1])
    assert two_way_partial_auc(scores, labels, 0.5, 0.75).item() == pytest.approx(0.25**2 / 2 / (0.5 * 0.75))
    assert two_way_partial_auc(scores, labels, 0.5, 0.5).item() == 0.0
    assert partial_auc(scores, labels, 0.3, standardized=True).item() == pytest.approx(0.5)


@pytest.mark.parametrize("max_fpr", [0.1, 0.3, 1.0])
def test_perfect_and_reversed_rankings(max_fpr):
    scores, labels = torch.arange(10.0), (torch.arange(10) > 6).int()
    assert two_way_partial_auc(scores, labels, 0.9, max_fpr).item() == pytest.approx(1.0, abs=1e-12)
    assert partial_auc(scores, labels, max_fpr).item() == pytest.approx(max_fpr, abs=1e-12)
    assert partial_auc(scores, labels, max_fpr, standardized=True).item() == pytest.approx(1.0, abs=1e-12)
    assert two_way_partial_auc(-scores, labels, 0.0, max_fpr).item() == 0.0


def double_loop(positive, negative, tau, surrogate, margin):
    loss = SURROGATE_LOSSES[surrogate]
    total = 0.0
    for p in positive:
        exponents = [loss(n - p, margin) / tau for n in negative]
        largest = max(exponents)
        total += tau * (largest + math.log(math.fsum(math.exp(e - largest) for e in exponents) / len(negative)))
    return total / len(positive)


@pytest.mark.parametrize("surrogate", sorted(SURROGATE_LOSSES))
@pytest.mark.parametrize("tau", [0.01, 1.0, 30.0])
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e4, -5e4)])
def test_objective_equals_a_double_loop_whatever_the_chunk(surrogate, tau, scale, shift):
    scores, labels = data(3, rows=70, scale=scale, shift=shift)
    positive, negative = scores[labels == 1], scores[labels == 0]
    expected = double_loop(positive.tolist(), negative.tolist(), tau, surrogate, 0.5)
    for chunk in (1, 7, len(negative) - 1, len(negative), 3 * len(negative) + 5, 2**22):
        found = partial_auc_objective(positive, negative, tau, surrogate, 0.5, chunk)
        assert found.dtype == torch.float64
        assert found.item() == pytest.approx(expected, rel=1e-11)


def test_objective_of_no_more_pairs_at_a_time_than_the_chunk(monkeypatch):
    sizes = []
    plain = module.pairwise_surrogate

    def recording(difference, surrogate, margin):
        sizes.append(difference.numel())
        return plain(difference, surrogate, margin)

    monkeypatch.setattr(module, "pairwise_surrogate", recording)
    for chunk in (1, 5, 11, 40, 1000):
        sizes.clear()
        partial_auc_objective(torch.randn(9), torch.randn(13), 1.0, chunk=chunk)
        assert sum(sizes) == 9 * 13
        assert max(sizes) <= chunk


def metrics():
    return [
        OneWayPartialAUC(0.3),
        OneWayPartialAUC(0.3, standardized=True),
        TwoWayPartialAUC(0.4, 0.6),
        PartialAUCObjective(0.5, "hinge", 1.0),
    ]


@pytest.mark.parametrize("batch_size", [1, 7, 64, 400])
def test_batches_and_whole(batch_size):
    scores, labels = data(5, levels=3)
    expected = [
        partial_auc(scores, labels, 0.3),
        partial_auc(scores, labels, 0.3, True),
        two_way_partial_auc(scores, labels, 0.4, 0.6),
        partial_auc_objective(scores[labels == 1], scores[labels == 0], 0.5, "hinge", 1.0),
    ]
    for metric, value in zip(metrics(), expected, strict=True):
        for part in zip(scores.split(batch_size), labels.split(batch_size), strict=True):
            metric.update(*part)
        assert metric.compute().item() == value.item()
        assert metric.compute().ndim == 0
        metric.reset()
        metric.update(scores[:50], labels[:50])
        assert metric.compute() != value


SHARES = {"uneven": (10, 390), "all on one": (0, 400)}


def _compute_share(rank, share):
    scores, labels = data(7)
    first = SHARES[share][0]
    mine = slice(first) if rank == 0 else slice(first, None)
    found = []
    for metric in metrics():
        for part in zip(scores[mine].split(100), labels[mine].split(100), strict=True):
            if len(part[0]):
                metric.update(*part)
        found.append(metric.compute().item())
        # After the exchange each process goes on with its own rows.
        metric.update(scores[:1], labels[:1])
        assert sum(map(len, metric.scores)) == len(scores[mine]) + 1
    return found


class _Work:
    def __init__(self, share):
        self.share = share

    def __call__(self, rank):
        return _compute_share(rank, self.share)


@pytest.mark.parametrize("share", SHARES)
def test_two_processes_with_uneven_shares(share, tmp_path):
    scores, labels = data(7)
    expected = []
    for metric in metrics():
        metric.update(scores, labels)
        expected.append(metric.compute().item())
    for found in in_two_processes(_Work(share), tmp_path):
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_label_dtypes(dtype):
    scores, labels = data(1)
    expected = partial_auc(scores, labels, 0.3)
    assert partial_auc(scores, labels.to(dtype), 0.3) == expected
    metric = OneWayPartialAUC(0.3)
    metric.update(scores[:200], labels[:200].to(dtype))
    metric.update(scores[200:], labels[200:])
    assert metric.compute() == expected


def test_score_dtypes():
    scores, labels = data(1)
    scores = scores.bfloat16().double()
    for metric in metrics():
        metric.update(scores, labels)
        expected = metric.compute().item()
        for dtype in (torch.bfloat16, torch.float32):
            metric.reset()
            metric.update(scores[:100].to(dtype), labels[:100])
            metric.update(scores[100:], labels[100:])
            assert metric.compute().item() == pytest.approx(expected, rel=1e-12)
    # Differences that only float64 holds survive, also in a module that was cast to half precision.
    close = OneWayPartialAUC(1.0).to(torch.bfloat16)
    close.update(1 + torch.tensor([2.0, 1.0], dtype=torch.float64) * 2.0**-50, torch.tensor([1, 0]))
    assert close.compute().item() == 1.0
    assert partial_auc(torch.tensor([3, 2, 1]), torch.tensor([1, 0, 0]), 1.0).item() == 1.0


@pytest.mark.parametrize(
    ("labels", "missing"),
    [([0, 0], "no positive rows"), ([1, 1], "no negative rows"), ([], "no rows"), (None, "no rows")],
)
def test_a_missing_class_warns_once_a_compute(labels, missing):
    for metric in metrics():
        if labels is not None:
            metric.update(torch.zeros(len(labels)), torch.tensor(labels, dtype=torch.long))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = metric.compute().item()
        messages = [w for w in caught if missing in str(w.message)]
        assert len(messages) == 1
        assert issubclass(messages[0].category, UserWarning)
        assert type(metric).__name__ in str(messages[0].message)
        assert math.isnan(value) if isinstance(metric, PartialAUCObjective) else value == 0.0
        metric.update(torch.tensor([1.0, 0.0]), torch.tensor([1, 0]))
        assert math.isfinite(metric.compute().item())
    if labels is not None:
        with pytest.raises(InputError, match=f"labels must hold both classes, got {missing}"):
            roc_curve(torch.zeros(len(labels)), torch.tensor(labels, dtype=torch.long))


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        (torch.zeros(2), torch.tensor([0, 2]), "labels must be 0 or 1, got 2 in row 1"),
        (torch.zeros(2), torch.tensor([-1, 1]), "labels must be 0 or 1, got -1 in row 0"),
        (
            torch.zeros(2),
            torch.tensor([0.0, 1.0]),
            "labels must be 0 or 1 in an integer or bool dtype, got torch.float32",
        ),
        (torch.tensor([0, math.nan, math.nan]), torch.tensor([0, 1, 1]), "NaN in 2 of 3 rows, first in row 1"),
        (torch.zeros(3), torch.tensor([0, 1]), r"must both have shape \(n,\), got shapes \(3,\) and \(2,\)"),
        (torch.zeros(2, 1), torch.tensor([0, 1]), r"must both have shape \(n,\), got shapes \(2, 1\) and \(2,\)"),
        (torch.zeros(2, 1), torch.tensor([[0], [1]]), r"got shapes \(2, 1\) and \(2, 1\)"),
        (torch.tensor(0.0), torch.tensor(1), r"got shapes \(\) and \(\)"),
        (torch.zeros(2, dtype=torch.complex64), torch.tensor([0, 1]), "scores must be real numbers"),
    ],
)
def test_bad_rows_leave_the_state_untouched(scores, labels, message):
    for metric in metrics():
        metric.update(*data(2))
        expected = metric.compute()
        with pytest.raises(InputError, match=message):
            metric.update(scores, labels)
        assert metric.compute() == expected
    with pytest.raises(InputError, match=message):
        partial_auc(scores, labels, 0.5)


@pytest.mark.parametrize("value", [0, -0.1, 1.01, math.nan, math.inf, "0.3", None, True])
def test_bad_max_fpr(value):
    for make in (OneWayPartialAUC, lambda max_fpr: TwoWayPartialAUC(0.5, max_fpr)):
        with pytest.raises(InputError, match=r"max_fpr must be a number in \(0, 1\], got"):
            make(value)


@pytest.mark.parametrize("value", [1, -0.1, 1.5, math.nan, "0.3", None, False])
def test_bad_min_tpr(value):
    with pytest.raises(InputError, match=r"min_tpr must be a number in \[0, 1\), got"):
        TwoWayPartialAUC(value, 0.5)


def test_bad_objective_arguments():
    with pytest.raises(InputError, match="tau must be a finite number above 0"):
        PartialAUCObjective(0.0)
    with pytest.raises(InputError, match="surrogate"):
        PartialAUCObjective(1.0, "cubic")
    with pytest.raises(InputError, match="margin"):
        PartialAUCObjective(1.0, "hinge", -1.0)
    scores = torch.zeros(3)
    for chunk in (0, 1.5, True):
        with pytest.raises(InputError, match="chunk must be an integer of at least 1"):
            partial_auc_objective(scores, scores, 1.0, chunk=chunk)
    with pytest.raises(InputError, match=r"negative_scores must have shape \(n,\) with n at least 1, got shape \(0,\)"):
        partial_auc_objective(scores, torch.zeros(0), 1.0)
    with pytest.raises(InputError, match=r"positive_scores must have shape .* got shape \(3, 1\)"):
        partial_auc_objective(scores.unsqueeze(1), scores, 1.0)
    with pytest.raises(InputError, match="negative_scores must not be NaN"):
        partial_auc_objective(scores, torch.tensor([math.nan]), 1.0)


def test_forward_gives_the_batch_value():
    scores, labels = data(4)
    metric = OneWayPartialAUC(0.3)
    assert metric(scores[:100], labels[:100]) == partial_auc(scores[:100], labels[:100], 0.3)
    metric(scores[100:], labels[100:])
    assert metric.compute() == partial_auc(scores, labels, 0.3)

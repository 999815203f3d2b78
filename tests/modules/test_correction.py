"""The mean over the classes of a batch as an estimate of that over all: every batch of a small data set enumerated."""

import itertools
import math

import pytest
import torch

from scent_lightning.duals import BSGD, DenseScores, SoftplusASGD
from scent_lightning.errors import InputError
from scent_lightning.functional import correct_scores, log_expected_occurrences, log_mean_exp
from scent_lightning.modules import ClassSampledLinear
from scent_lightning.modules.class_frequencies import ClassFrequencies
from scent_lightning.tasks import ExtremeClassificationTask

K, D = 50, 4
# Zipf's law, and no class without a row.
COUNTS = [max(round(6 / (k + 1)), 1) for k in range(K)]
LABELS = [k for k, count in enumerate(COUNTS) for _ in range(count)]
ANCHORS = [0, LABELS.index(1), LABELS.index(30)]


def head_of(**arguments):
    head = ClassSampledLinear(D, K, correction="frequency", **arguments).double()
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    head.frequencies.give(torch.tensor(COUNTS))
    return head


def features_of(row):
    return torch.randn(1, D, generator=torch.Generator().manual_seed(row), dtype=torch.float64)


def full_mean(head, row):
    """1 / (K − 1) Σ exp over all classes but the own."""
    logits = (features_of(row) @ head.weight.T)[0].detach()
    scores = logits - logits[LABELS[row]]
    return (scores.exp().sum() - 1).item() / (K - 1)


def inner_mean(samples):
    return samples.sides()[0].log_mean.exp()[0].item()


def by_samples(head, row, labels):
    """The anchor's mean in a batch that one process has."""
    features = torch.cat([features_of(row)] * len(labels))
    return inner_mean(head.samples(features, torch.tensor(labels)))


def by_scores(head, row, labels):
    features = torch.cat([features_of(row)] * len(labels))
    return inner_mean(DenseScores(*head(features, torch.tensor(labels))))


def of_two_processes(head, row, labels):
    """The anchor is the only row of its process."""
    return inner_mean(head.samples(features_of(row), torch.tensor(labels[:1]), torch.tensor(labels)))


def with_repetition(head, row, labels):
    """By hand, each row of the batch a column: a class counts as often as it occurs."""
    labels = torch.tensor(labels)
    logits = features_of(row) @ head.weight[labels].T
    mask = (labels != labels[0]).unsqueeze(0)
    log_q = log_expected_occurrences(head.frequencies.counts, len(LABELS) - 1, len(labels) - 1)[labels]
    scores = correct_scores(logits - logits[:, :1], log_q, K - 1, mask)
    return log_mean_exp(scores, mask).exp().item()


def expectation(way, head, row, others):
    rest = [label for i, label in enumerate(LABELS) if i != row]
    batches = itertools.combinations(range(len(rest)), others)
    found = [way(head, row, [LABELS[row], *(rest[i] for i in batch)]) for batch in batches]
    return math.fsum(found) / len(found)


@pytest.mark.parametrize("way", [by_samples, by_scores, of_two_processes, with_repetition])
def test_expectation_over_all_batches_is_the_mean_over_all_classes(way):
    """Of batches of two sizes by the same head: the last batch of an epoch may be shorter."""
    head = head_of()
    for row in ANCHORS:
        for others in (1, 2) if way is by_samples and row == 0 else (1,):
            assert expectation(way, head, row, others) == pytest.approx(full_mean(head, row), rel=1e-10)


@pytest.mark.parametrize("wrong", ["sign", "none", "all rows", "counts"])
def test_another_correction_does_not_have_that_expectation(wrong, monkeypatch):
    head = head_of()
    right = ClassFrequencies.offsets
    if wrong == "sign":
        monkeypatch.setattr(ClassFrequencies, "offsets", lambda *arguments: -right(*arguments))
    elif wrong == "none":
        head.correction = "none"
    elif wrong == "all rows":  # the anchor is in the batch, and is none of the others
        monkeypatch.setattr(ClassFrequencies, "offsets", lambda self, c, others, d: right(self, c, others + 1, d))
    else:
        head.frequencies.give([1] * K)
    assert abs(expectation(by_samples, head, 0, 1) / full_mean(head, 0) - 1) > 1e-3


class Halves:
    """Each of the splits of the batch's classes in turn."""

    def __init__(self, size):
        self.splits = [
            torch.tensor([i in part for i in range(size)]) for part in itertools.combinations(range(size), size // 2)
        ]


def test_halves_of_the_classes_of_a_batch(monkeypatch):
    """Over all splits, each half's mean has the mean over the whole batch as its expectation."""
    more = {"independent_sample": True, "include_target": False}
    task = ExtremeClassificationTask(D, K, len(LABELS), BSGD(), **more).double()
    task.head.weight.data = head_of().weight.data
    task.head.frequencies.give(torch.tensor(COUNTS))
    for labels in ([0, 3, 7, 7, 30, 45], [1, 0, 2], [5, 9]):
        batch, labels = torch.cat([features_of(4)] * len(labels)), torch.tensor(labels)
        size = len(labels.unique())
        whole = task.head.samples(batch, labels).sides()[0].log_mean.exp()
        found = torch.zeros(2, len(labels), dtype=torch.float64)
        splits = Halves(size).splits
        for split in splits:
            monkeypatch.setattr("scent_lightning.tasks.extreme_classification.random_half", lambda *_, s=split: s)
            parts = task._samples(batch, labels)
            found += torch.stack([part.sides()[0].log_mean.exp() for part in parts])
        torch.testing.assert_close(found / len(splits), whole.expand(2, -1), rtol=1e-10, atol=0)


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_uniform_draws_need_no_correction(draws, monkeypatch):
    """Every draw of a head of four classes; one without a negative is passed over."""
    head = ClassSampledLinear(D, 4, "uniform", num_negatives=draws, correction="frequency").double()
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    features, found = features_of(3), []
    for drawn in itertools.product(range(4), repeat=draws):
        monkeypatch.setattr(torch, "randint", lambda *_, d=drawn, **__: torch.tensor(d))
        samples = head.samples(features, torch.tensor([2]))
        if samples.mask.any():
            found.append(inner_mean(samples))
    scores = (features @ head.weight.T)[0]
    exact = ((scores - scores[2]).exp().sum().item() - 1) / 3
    assert sum(found) / len(found) == pytest.approx(exact, rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("include_target", [False, True])
@pytest.mark.parametrize("is_given", [False, True])
def test_all_ways_have_the_same_scores(include_target, is_given, dtype):
    """The exponentials, the scores for an update that needs them, and the formula."""
    head = head_of(include_target=include_target).to(dtype)
    if not is_given:
        head.frequencies = ClassFrequencies(K)
        head.frequencies.see(torch.tensor(LABELS))
    labels = torch.tensor([0, 7, 0, 3, 49])
    features = torch.randn(5, D, dtype=dtype, generator=torch.Generator().manual_seed(1))
    classes = labels.unique()
    logits = features @ head.weight[classes].T
    scores = logits - (features * head.weight[labels]).sum(dim=1, keepdim=True)
    scores = scores - head.frequencies.log_inclusion(classes, 4).to(dtype)
    others = classes != labels.unsqueeze(1)
    mean = scores.exp().masked_fill(~others, 0).sum(dim=1) / (K - 1) + include_target / (K - 1)
    samples = head.samples(features, labels)
    for found in (samples, samples.dense(), samples.dense().dense()):
        torch.testing.assert_close(found.sides()[0].log_mean.to(dtype), mean.log(), rtol=1e-5, atol=1e-6)
    assert head.samples(features, labels).dense().values.dtype == dtype


def test_estimated_frequencies_come_to_those_of_the_rows():
    """By rows that go by, each once an epoch; before any all classes count alike."""
    frequencies, given = ClassFrequencies(K), ClassFrequencies(K)
    given.give(COUNTS)
    every = torch.arange(K)
    assert frequencies.log_inclusion(every, 5).std() < 1e-14
    assert frequencies.offsets(torch.tensor([3, 8]), 1, torch.float64).tolist() == pytest.approx(
        [math.log(50 / 49)] * 2
    )
    errors = []
    for _ in range(3):
        for _ in range(20):
            frequencies.see(torch.tensor(LABELS))
        errors.append((frequencies.log_inclusion(every, 5) - given.log_inclusion(every, 5)).abs().max().item())
    # What is left is that rows are drawn without replacement.
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.06
    frequencies.give(COUNTS)
    frequencies.see(torch.tensor([1, 2, 3]))
    assert torch.equal(frequencies.counts, given.counts)


def test_state_has_what_there_is():
    one, other = head_of(), ClassSampledLinear(D, K)
    other.load_state_dict(one.state_dict())
    assert other.frequencies.are_given
    assert torch.equal(other.frequencies.counts, one.frequencies.counts)
    other.frequencies.give([1] * K)
    assert one.frequencies.counts[0] == 6  # a copy
    seen = ClassSampledLinear(D, K)
    assert set(seen.state_dict()) == {"weight"}
    seen.frequencies.see(torch.tensor([3, 3, 5]))
    assert seen.state_dict()["frequencies.seen"].sum() == 3
    third = ClassSampledLinear(D, K)
    third.load_state_dict(seen.state_dict())
    assert not third.frequencies.are_given
    assert torch.equal(
        third.frequencies.log_inclusion(torch.arange(K), 2), seen.frequencies.log_inclusion(torch.arange(K), 2)
    )
    third.load_state_dict({"weight": torch.zeros(K, D)})  # of an older version
    assert third.frequencies.counts.sum() == 3


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, 2], r"class_counts must have one number for each of the 3 classes, got shape \(2,\)"),
        ([[1, 2, 3]], r"class_counts must have one number for each of the 3 classes, got shape \(1, 3\)"),
        ([1, -2, 3], r"class_counts must be at least 0, got -2 for class 1"),
        ([0.5, 0.2, 0.3], r"class_counts must be integers, the training rows of each class, got torch.float32"),
        ([0, 0, 0], r"class_counts must have a row of some class, got 0 for all of them"),
    ],
)
def test_counts_that_do_not_fit(counts, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        ClassFrequencies(3).give(counts)


def test_class_that_has_all_rows_and_a_batch_of_all_rows():
    frequencies = ClassFrequencies(3)
    frequencies.give([5, 0, 0])
    assert frequencies.log_inclusion(torch.tensor([0, 1]), 4).tolist() == [0.0, -math.inf]
    assert frequencies.log_inclusion(torch.tensor([0]), 100).tolist() == [0.0]  # rows that came twice
    assert frequencies.without_row(torch.tensor([0, 2, 2])).tolist() == [2]


def test_bad_choice():
    with pytest.raises(InputError, match="correction must be one of frequency, none, got 'logq'"):
        ClassSampledLinear(D, K, correction="logq")


def test_an_update_that_needs_the_scores_gets_them_corrected():
    head = head_of(include_target=True)
    labels = torch.tensor([0, 1, 30])
    features = torch.randn(3, D, dtype=torch.float64)
    dense = head.samples(features, labels).dense()
    assert SoftplusASGD(0.1, rho=1e-3).needs_scores
    assert dense.values.shape == (3, 4)
    assert dense.values[:, 3].unique().tolist() == pytest.approx([math.log(3 / (K - 1))])

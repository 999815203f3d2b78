"""Recall of retrieval against plain loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scent_lightning.errors import InputError
from scent_lightning.metrics import CaptionRecall, RetrievalRecall, retrieval_ranks
from scent_lightning.tasks.clip import text_group


def ranks_by_loops(queries, items, group):
    found = []
    for i, query in enumerate(queries.tolist()):
        scores = [sum(a * b for a, b in zip(query, item, strict=True)) for item in items.tolist()]
        best = max(score for score, other in zip(scores, group, strict=True) if other == group[i])
        found.append(sum(score >= best and other != group[i] for score, other in zip(scores, group, strict=True)))
    return found


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 12), st.integers(1, 5))
def test_ranks(data, count, chunk):
    # Small integers: ties are common and products exact.
    rows = st.lists(st.lists(st.integers(-2, 2), min_size=2, max_size=2), min_size=count, max_size=count)
    queries, items = (torch.tensor(data.draw(rows), dtype=torch.float32) for _ in range(2))
    group = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    assert retrieval_ranks(queries, items, torch.tensor(group), chunk).tolist() == ranks_by_loops(queries, items, group)
    own = list(range(count))
    expected = ranks_by_loops(queries, items, own)
    assert retrieval_ranks(queries, items, chunk=chunk).tolist() == expected
    assert retrieval_ranks(queries, items, torch.tensor(own), chunk).tolist() == expected


def test_two_images_of_one_text():
    images = torch.nn.functional.normalize(torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.0, 1.0]]), dim=1)
    texts = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    alone, together = RetrievalRecall(ks=(1,)), RetrievalRecall(ks=(1,))
    alone.update(images, texts)
    together.update(images, texts, group=torch.tensor([5, 5, -3]))
    # Equal texts are equally near, and of two images one is nearer.
    assert alone.compute()["image_to_text_R@1"] == pytest.approx(1 / 3)
    assert alone.compute()["text_to_image_R@1"] == pytest.approx(2 / 3)
    assert together.compute() == {"image_to_text_R@1": 1.0, "text_to_image_R@1": 1.0}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 6), st.integers(0, 2))
def test_several_captions(data, count, parts):
    """Against loops, with ties and captions of the same words, in batches of any order."""
    point = st.lists(st.integers(-2, 2), min_size=2, max_size=2)
    images = torch.tensor(data.draw(st.lists(point, min_size=count, max_size=count)), dtype=torch.float32)
    owners = list(range(count)) + data.draw(st.lists(st.integers(0, count - 1), max_size=6))
    words = data.draw(st.lists(st.integers(0, 4), min_size=len(owners), max_size=len(owners)))
    points = torch.tensor(data.draw(st.lists(point, min_size=5, max_size=5)), dtype=torch.float32)
    texts = points[words]  # captions of the same words are the same
    scores = (images @ texts.T).tolist()
    hits = {"image_to_text": [], "text_to_image": []}
    for row in range(count):
        best = max(score for score, owner in zip(scores[row], owners, strict=True) if owner == row)
        right = {words[t] for t, owner in enumerate(owners) if owner == row and scores[row][t] == best}
        wrong = [t for t, o in enumerate(owners) if o != row and scores[row][t] >= best]
        # Of several own ones that are equally near, one decides which words are the same.
        hits["image_to_text"].append({sum(words[t] != word for t in wrong) for word in right})
    for text, owner in enumerate(owners):
        hits["text_to_image"].append({sum(of[text] >= scores[owner][text] for of in scores) - 1})
    metric = CaptionRecall(ks=(1, 2))
    rows, owners, words = torch.arange(count) + 7, torch.tensor(owners) + 7, torch.tensor(words)
    for some, captions in zip(
        torch.arange(count).tensor_split(parts + 1), torch.arange(len(owners)).tensor_split(parts + 1), strict=True
    ):
        metric.update(images[some], rows[some], texts[captions], owners[captions], words[captions])
    found = metric.compute()
    for way, before in hits.items():
        for k in (1, 2):
            least, most = (sum(of(ranks) < k for ranks in before) / len(before) for of in (max, min))
            assert least - 1e-6 <= found[f"{way}_R@{k}"].item() <= most + 1e-6


def test_captions_without_words_or_of_wrong_shapes():
    metric, e = CaptionRecall(ks=(1,)), torch.eye(2)
    same = torch.tensor([[1.0, 0.0]]).repeat(2, 1)
    metric.update(e, torch.arange(2), same, torch.arange(2))
    assert metric.compute() == {"image_to_text_R@1": 0.0, "text_to_image_R@1": 0.5}
    empty = CaptionRecall(ks=(1,))
    assert empty.compute() == {"image_to_text_R@1": 0.0, "text_to_image_R@1": 0.0}
    for arguments in (
        (e, torch.arange(3), e, torch.arange(2)),
        (e, torch.arange(2), e, torch.arange(1)),
        (e, torch.arange(2), e, torch.arange(2), torch.arange(5)),
    ):
        with pytest.raises(InputError, match=r"must have shape \(B,\) of \(2, 2\), got"):
            CaptionRecall().update(*arguments)
    metric.update(e, torch.arange(2), e, torch.arange(2), torch.arange(2))
    with pytest.raises(InputError, match="words must be given for all captions or none, got 2 of 4"):
        metric.compute()
    with pytest.raises(InputError, match="ks must hold at least one k"):
        CaptionRecall(ks=())


def test_a_pair_that_comes_twice_counts_once():
    generator = torch.Generator().manual_seed(0)
    images, texts = torch.randn(2, 7, 3, generator=generator)
    once, twice = RetrievalRecall(), RetrievalRecall()
    once.update(images, texts)
    order = torch.tensor([3, 1, 0, 3, 5, 6, 2, 4, 0])
    for part in order.split(4):
        twice.update(images[part], texts[part], index=part)
    assert once.compute() == twice.compute()


def test_text_group():
    tokens = torch.tensor([[1, 2, 0], [2, 1, 0], [1, 2, 0], [1, 2, 3]])
    group = text_group(tokens)
    assert group.dtype == torch.int64
    assert (group.unsqueeze(0) == group.unsqueeze(1)).tolist() == [
        [True, False, True, False],
        [False, True, False, False],
        [True, False, True, False],
        [False, False, False, True],
    ]
    many = torch.cartesian_prod(torch.arange(49_400, 49_408), torch.arange(300), torch.arange(100))
    assert text_group(many).unique().numel() == len(many)


def test_errors():
    with pytest.raises(InputError, match="each of ks must be an integer of at least 1, got 0"):
        RetrievalRecall(ks=(5, 0))
    with pytest.raises(InputError, match="ks must hold at least one k"):
        RetrievalRecall(ks=())
    metric = RetrievalRecall()
    with pytest.raises(InputError, match=r"shape \(B, D\), got \(2, 3\) and \(3, 3\)"):
        metric.update(torch.zeros(2, 3), torch.zeros(3, 3))
    with pytest.raises(InputError, match=r"index must have shape \(2,\), got \(3,\)"):
        metric.update(torch.zeros(2, 3), torch.zeros(2, 3), index=torch.arange(3))
    assert not metric.images
    metric.update(torch.zeros(2, 3), torch.zeros(2, 3))
    metric.update(torch.zeros(2, 3), torch.zeros(2, 3), group=torch.arange(2))
    with pytest.raises(InputError, match="group must be given for all pairs or none, got 2 of 4"):
        metric.compute()


def test_no_pairs():
    metric = RetrievalRecall()
    metric.update(torch.zeros(0, 3), torch.zeros(0, 3))
    assert {value.item() for value in metric.compute().values()} == {0.0}

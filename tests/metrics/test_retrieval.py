"""Recall of retrieval against plain loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scent_lightning.errors import InputError
from scent_lightning.metrics import RetrievalRecall, retrieval_ranks
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

"""Ranks, softmax and best items among all, piece by piece, against the whole matrix of scores; and the log-sum-exp."""

import math

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scent_lightning.functional import full_ranking, log_sum_exp
from scent_lightning.functional.full_ranking import Entries, rank_among_all, top_of_all

# Whole numbers, whose products are exact: so scores are equal often, and the order of equal ones shows.
SMALL = st.integers(-2, 2)


@st.composite
def problems(draw):
    """Queries, items, the right ones of each row (none, one or several), those left out, and sizes of the pieces."""
    width = draw(st.integers(1, 2))
    rows, items = draw(st.integers(0, 9)), draw(st.integers(1, 17))
    queries, vectors = (
        torch.tensor(
            draw(st.lists(st.lists(SMALL, min_size=width, max_size=width), min_size=n, max_size=n)), dtype=torch.float32
        ).view(n, width)
        for n in (rows, items)
    )
    kinds = draw(st.lists(st.lists(st.integers(0, 2), min_size=items, max_size=items), min_size=rows, max_size=rows))
    kind = torch.tensor(kinds, dtype=torch.int64).view(rows, items)
    if draw(st.booleans()):  # one right item in each row
        own = torch.tensor(draw(st.lists(st.integers(0, items - 1), min_size=rows, max_size=rows)), dtype=torch.int64)
        kind = kind.clamp(max=1).scatter(1, own.unsqueeze(1), 2)
    tile = draw(st.tuples(st.integers(1, 4), st.integers(1, 5)))
    return queries, vectors, kind, tile, draw(st.integers(1, 18)), draw(st.sampled_from([1.0, 0.5]))


def pieces(vectors, chunk):
    return [(start, vectors[start : start + chunk]) for start in range(0, len(vectors), chunk)]


@settings(deadline=None, max_examples=100)
@given(problems(), st.integers(1, 6))
def test_piece_by_piece_is_the_whole_matrix(problem, k):
    queries, vectors, kind, tile, chunk, scale = problem
    right, left_out = (Entries(*(kind == number).nonzero(as_tuple=True)) for number in (2, 1))
    scores = queries @ vectors.T * scale
    own = scores[right.rows, right.items]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_ranking, "_TILE", tile)
        ranks, losses = rank_among_all(queries, pieces(vectors, chunk), right, own, left_out, scale)
        items, best = top_of_all(queries, pieces(vectors, chunk), k, left_out, scale)
        without = rank_among_all(queries, pieces(vectors, chunk), right, own, scale=scale)[0]
    numbers = torch.arange(len(vectors))
    for place, (row, item) in enumerate(zip(*right, strict=True)):
        before = (scores[row] > own[place]) | ((scores[row] == own[place]) & (numbers < item))
        assert without[place] == before.sum()
        assert ranks[place] == (before & (kind[row] != 1)).sum()
        assert losses[place].item() == pytest.approx((scores[row].double().logsumexp(0) - own[place]).item(), abs=1e-5)
    ranked = scores.masked_fill(kind == 1, -math.inf)
    expected = ranked.topk(min(k, len(vectors)), dim=1).values
    assert torch.equal(best, expected)
    assert torch.equal(items >= 0, expected > -math.inf)
    assert torch.equal(ranked.gather(1, items.clamp(min=0))[items >= 0], best[items >= 0])
    assert all(len(set(row[row >= 0].tolist())) == int((row >= 0).sum()) for row in items)


def test_pieces_of_the_real_size_and_a_right_item_that_comes_last():
    generator = torch.Generator().manual_seed(0)
    queries = torch.randint(-3, 4, (600, 3), generator=generator).float()
    vectors = torch.randint(-3, 4, (2500, 3), generator=generator).float()
    scores, right = queries @ vectors.T, torch.randint(2500, (600,), generator=generator)
    own = scores.gather(1, right.unsqueeze(1))
    before = (scores > own) | ((scores == own) & (torch.arange(2500) < right.unsqueeze(1)))
    entries = Entries(torch.arange(600), right)
    ranks, losses = rank_among_all(queries, pieces(vectors, 2000), entries, own.squeeze(1))
    assert torch.equal(ranks, before.sum(dim=1))
    assert torch.allclose(losses, torch.nn.functional.cross_entropy(scores, right, reduction="none"), atol=1e-5)
    last = rank_among_all(queries, pieces(vectors, 2000), entries, torch.full((600,), -math.inf))[0]
    assert (last == 2500 - (scores.gather(1, right.unsqueeze(1)) > -math.inf).long().squeeze(1)).all()


@settings(deadline=None)
@given(st.lists(st.floats(-1e30, 1e30) | st.floats(-120, 120), min_size=1, max_size=20), st.booleans())
def test_log_sum_exp_however_far_apart_scores_are(scores, wide):
    given_scores = torch.tensor([scores], dtype=torch.float64 if wide else torch.float32)
    with mp.workdps(60):
        exact = [mp.mpf(value) for value in given_scores[0].tolist()]
        largest = max(exact)
        expected = float(largest + mp.log(sum(mp.exp(value - largest) for value in exact)))
    assert log_sum_exp(given_scores).item() == pytest.approx(expected, rel=1e-14 if wide else 3e-7, abs=2e-7)


def test_log_sum_exp_of_infinite_scores_and_of_half_precision():
    infinite = torch.tensor([[-math.inf, -math.inf], [-math.inf, 1.0], [math.inf, 1.0], [math.nan, 1.0]])
    assert log_sum_exp(infinite)[:3].tolist() == [-math.inf, 1.0, math.inf]
    assert log_sum_exp(infinite)[3].isnan()
    half = log_sum_exp(torch.tensor([[300.0, 300.0]], dtype=torch.bfloat16))
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(300 + math.log(2))

"""Scores of −∞, which is how logits are masked: such a sample has weight 0, and a row of nothing else has no sample."""

import math
import warnings

import pytest
import torch

from scent_lightning.duals import ASGD, BSGD, SCENT, SOX, DualVariable, SoftplusASGD, UMax
from scent_lightning.functional import exponential_objective, log_mean_exp, softplus_objective

UPDATES = [
    SCENT(0.0),
    SCENT("auto"),
    SOX(0.5),
    BSGD(),
    ASGD(0.1),
    UMax(0.1, 1.0),
    SoftplusASGD(0.1, 1e-3),
    SoftplusASGD(0.1, 1e-3, max_log_weight=1.0),
]


def scores_of(rows, dtype=torch.float32):
    return torch.tensor(rows, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("update", UPDATES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_of_weight_zero(update, dtype):
    """−∞ is the limit of very small scores: ν, loss and gradient are those of −1e4."""
    results = []
    for low in (-math.inf, -1e4):
        table = DualVariable(6, update)
        scores = scores_of([[0.3, low, 1.0], [low, low, -0.5], [0.1, 0.2, 0.3]], dtype)
        for _ in range(3):
            loss = table.entropic_risk(scores, torch.tensor([4, 0, 2]), progress=0.5)
        loss.backward()
        results.append((table.nu.clone(), loss.detach(), scores.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("update", UPDATES, ids=repr)
@pytest.mark.parametrize("masked", [False, True])
def test_a_row_without_a_sample(update, masked):
    """It is as if it were masked: its ν stays, and it counts for nothing in the mean."""
    low = -math.inf
    table, expected = DualVariable(6, update), DualVariable(6, update)
    scores = scores_of([[0.3, 0.5, 1.0], [low, low, low]])
    mask = torch.tensor([[True, True, False], [True, False, True]]) if masked else None
    for each in (table, expected):
        each.entropic_risk(torch.zeros(2, 3), torch.tensor([4, 0]), progress=0.5)
    before = table.nu[0].item()
    loss = table.entropic_risk(scores, torch.tensor([4, 0]), mask, progress=0.5)
    loss.backward()
    alone = expected.entropic_risk(scores.detach()[:1], torch.tensor([4]), None if mask is None else mask[:1], 0.5)
    torch.testing.assert_close(loss.detach(), alone)
    assert table.nu[0].item() == before
    torch.testing.assert_close(table.nu, expected.nu)
    assert scores.grad[1].eq(0).all()
    assert scores.grad[0].isfinite().all()


def test_only_rows_without_a_sample():
    table = DualVariable(3, SCENT(0.0))
    with pytest.warns(UserWarning, match="no valid sample in any row for dual variable 'nu'"):
        loss = table.entropic_risk(torch.full((2, 4), -math.inf), torch.tensor([0, 1]))
    assert loss == 0
    assert not table.visited.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        table.entropic_risk(torch.full((1, 4), -math.inf), torch.tensor([0]))
        table.entropic_risk(torch.zeros(1, 4), torch.tensor([0]), torch.zeros(1, 4, dtype=torch.bool))


@pytest.mark.parametrize("rows", [1, 2])
def test_one_anchor(rows):
    """The shortcut of one row gives what two rows give."""
    table = DualVariable(5, SCENT(0.0))
    scores = scores_of([[1.0, -math.inf, 0.5]] * rows)
    loss = table.entropic_risk(scores, torch.arange(rows))
    loss.backward()
    assert table.nu[0].item() == pytest.approx(math.log((math.exp(1.0) + math.exp(0.5)) / 3))
    assert scores.grad.isfinite().all()


def test_functions():
    scores = torch.tensor([[-math.inf, 0.0], [-math.inf, -math.inf]])
    assert log_mean_exp(scores).tolist() == [pytest.approx(-math.log(2)), -math.inf]
    nu = torch.tensor([0.5, 3.0])
    expected = math.exp(-0.5) / 2 - 0.5
    assert exponential_objective(nu, scores).tolist() == [pytest.approx(expected), 0.0]
    for mask in (None, torch.ones(2, 2, dtype=torch.bool)):
        found = softplus_objective(nu, scores, 1e-6, mask)
        assert found.tolist() == [pytest.approx(expected, rel=1e-4), 0.0]
        assert SoftplusASGD(0.1, 1e-3).step(nu, scores, mask)[1] == 3.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_beside_what_is_wrong(value):
    table = DualVariable(5, SCENT(0.0))
    with pytest.raises(RuntimeError, match="the scores are not finite") as caught:
        table.entropic_risk(torch.tensor([[0.0, -math.inf], [value, -math.inf]]), torch.tensor([3, 1]))
    assert (caught.value.num_anchors, caught.value.first_index) == (1, 1)

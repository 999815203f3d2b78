"""The effective number of rows against mpmath and in closed form; its inverse; the metric."""

import itertools
import math

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scent_lightning.errors import InputError
from scent_lightning.functional import effective_rows, temperature_for
from scent_lightning.metrics import EffectiveRows


def exact(losses, tau) -> float:
    mp.mp.dps = 60
    weights = [mp.exp((mp.mpf(x) - max(losses)) / tau) for x in losses]
    return float(sum(weights) ** 2 / sum(w**2 for w in weights))


LOSSES = st.lists(st.floats(0, 1e12), min_size=2, max_size=30)


@settings(deadline=None)
@given(LOSSES, st.floats(-6, 12).map(lambda power: 10.0**power))
def test_equals_the_formula(losses, tau):
    found = effective_rows(torch.tensor(losses, dtype=torch.float64), tau).item()
    assert found == pytest.approx(exact(losses, tau), rel=1e-9)
    metric = EffectiveRows(tau)
    for part in torch.tensor(losses, dtype=torch.float64).split(7):
        metric.update(part)
    # The metric shifts by nothing: its logarithms have the size of the largest loss over tau.
    assert metric.compute().item() == pytest.approx(found, rel=1e-9 + 1e-15 * max(losses) / tau)


def test_closed_forms():
    losses = torch.tensor([2.0] * 7 + [0.0] * 93)
    assert effective_rows(losses, 1e-3).item() == 7
    assert effective_rows(losses, 1e12).item() == pytest.approx(100)
    share = math.exp(-2 / 5.0)
    assert effective_rows(losses, 5.0).item() == pytest.approx((7 + 93 * share) ** 2 / (7 + 93 * share**2))
    # Losses that are exponential with mean m: sum p² is n·E e^{2l/τ}/(n·E e^{l/τ})² = (1 − m/τ)²/(1 − 2m/τ)/n.
    quantiles = -torch.log1p(-(torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000)
    assert effective_rows(quantiles, 10.0).item() / 200_000 == pytest.approx((1 - 0.2) / (1 - 0.1) ** 2, rel=1e-3)


@settings(deadline=None)
@given(LOSSES, st.floats(0, 1))
def test_the_temperature_for_so_many_rows(losses, part):
    values = torch.tensor(losses, dtype=torch.float64)
    rows = 1 + part * (len(losses) - 1.001)
    tau = temperature_for(values, rows)
    ties = int((values == values.max()).sum())
    if tau == 0:
        assert ties >= rows
    else:
        below, above = effective_rows(values, tau / 1.001).item(), effective_rows(values, tau * 1.001).item()
        assert below - 1e-6 <= rows <= above + 1e-6


def test_more_rows_count_at_higher_temperatures():
    losses = torch.rand(50, generator=torch.Generator().manual_seed(0)) * 30
    found = [effective_rows(losses, tau).item() for tau in torch.logspace(-3, 4, 60).tolist()]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(found))


def test_processes_of_the_metric_are_one():
    losses = 30 * torch.rand(90, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = [EffectiveRows(2.0) for _ in range(3)]
    for metric, share in zip(parts, losses.split([10, 50, 30]), strict=True):
        metric.update(share)
    merged = parts[0]
    for state, reduction in merged._reductions.items():
        setattr(merged, state, reduction(torch.stack([getattr(metric, state) for metric in parts])))
    merged._computed = None
    assert merged.compute().item() == pytest.approx(effective_rows(losses, 2.0).item(), rel=1e-12)
    merged.reset()
    assert math.isnan(merged.compute().item())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: effective_rows(torch.zeros(0), 1.0), r"losses must be of shape \(n,\) with n at least 1, got \(0,\)"),
        (lambda: effective_rows(torch.zeros(2, 2), 1.0), r"got \(2, 2\)"),
        (lambda: effective_rows(torch.zeros(2), 0.0), "tau must be a finite number above 0"),
        (lambda: temperature_for(torch.zeros(3), 3), "rows must be at least 1 and below the 3 losses, got 3"),
        (lambda: temperature_for(torch.zeros(3), 0.5), "got 0.5"),
        (lambda: EffectiveRows(-1.0), "tau must be a finite number above 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(InputError, match=message):
        call()

"""EntropicRisk against mpmath, across batches and processes."""

import copy
import math

import mpmath as mp
import pytest
import torch

from scent_lightning.errors import InputError
from scent_lightning.metrics import EntropicRisk


def exact(losses, tau) -> float:
    mp.mp.dps = 60
    values = losses.double().flatten().tolist()
    return float(tau * mp.log(sum(mp.exp(mp.mpf(x) / tau) for x in values) / len(values)))


@pytest.mark.parametrize("tau", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_equals_the_formula_over_batches(tau, scale):
    losses = scale * torch.rand(257, generator=torch.Generator().manual_seed(0))
    metric = EntropicRisk(tau)
    for batch in losses.split(50):
        metric.update(batch)
    assert metric.compute().item() == pytest.approx(exact(losses, tau), rel=1e-12)
    assert losses.mean().item() <= metric.compute().item() <= losses.max().item()


def test_merging_processes():
    losses = 30 * torch.rand(90, generator=torch.Generator().manual_seed(1))
    parts = [EntropicRisk(2.0) for _ in range(3)]
    for metric, share in zip(parts, losses.split([10, 50, 30]), strict=True):
        metric.update(share)
    merged = copy.deepcopy(parts[0])
    # What torchmetrics does after its all_gather: stack the states and reduce each by its function.
    for state, reduction in merged._reductions.items():
        setattr(merged, state, reduction(torch.stack([getattr(metric, state) for metric in parts])))
    merged._update_count = 1
    merged._computed = None
    assert merged.compute().item() == pytest.approx(exact(losses, 2.0), rel=1e-12)


def test_empty_reset_and_half_precision():
    metric = EntropicRisk(1.0)
    metric.update(torch.zeros(0))
    assert math.isnan(metric.compute().item())
    metric.update(torch.tensor([1.5], dtype=torch.bfloat16))
    assert metric.compute().item() == 1.5
    metric.reset()
    metric.to(torch.bfloat16).update(torch.tensor([1.0 + 2.0**-20]))
    assert metric.compute().dtype == torch.float64
    assert metric.compute().item() == pytest.approx(1.0 + 2.0**-20, rel=1e-12)


@pytest.mark.parametrize("tau", [0, -1.0, math.inf, math.nan, "1", True])
def test_bad_tau(tau):
    with pytest.raises(InputError, match="tau must be a finite number above 0"):
        EntropicRisk(tau)

"""The softmax over all classes with a dual variable, against torch's cross-entropy, in turns.

A linear head without bias, ``negatives="all"`` with the own class in the sum, SCENT, one thread: forward and backward
pass of a batch, the table of ν included, over those of ``cross_entropy(features @ weight.T, labels)``. Logits are a few
nats apart, or ("far") a hundred, as in a head that is sure. Medians; ``time_ratio`` is ours over torch's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from scent_lightning.duals import SCENT, DualVariable
from scent_lightning.modules import ClassSampledLinear

SIZES = ((128, 1_000, 64), (128, 20_902, 64), (512, 29_012, 64), (128, 10_000, 512))  # rows, classes, features
SPREADS = {"near": 1.0, "far": 30.0}  # deviation of the logits, in nats


def steps(rows: int, classes: int, width: int, spread: float) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Our loss and torch's as functions of the same weights."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(rows, width, generator=generator) / width**0.5
    labels = torch.randint(classes, (rows,), generator=generator)
    head = ClassSampledLinear(width, classes, negatives="all", include_target=True)
    with torch.no_grad():
        head.weight.copy_(torch.randn(classes, width, generator=generator) * spread)
    plain = nn.Parameter(head.weight.detach().clone())
    # The step size is small, since ν is far from 0.
    dual, index = DualVariable(rows, SCENT(log_alpha=-spread * 4, max_log_weight=2.0)), torch.arange(rows)

    def ours() -> Tensor:
        head.weight.grad = None
        return dual.entropic_risk(head.samples(features, labels), index)

    def torchs() -> Tensor:
        plain.grad = None
        return nn.functional.cross_entropy(features @ plain.T, labels)

    return ours, torchs


def milliseconds(loss: Callable[[], Tensor]) -> float:
    """Of one forward and backward pass."""
    start = time.perf_counter()
    loss().backward()  # type: ignore[no-untyped-call]
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30, help="passes of each kind (30)")
    names = ("ROWS", "CLASSES", "FEATURES")
    parser.add_argument(
        "--size", nargs=3, type=int, action="append", metavar=names, help="instead of those of the table"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(__doc__)
    ratios: dict[str, float] = {}
    for rows, classes, width in arguments.size or SIZES:
        for name, spread in SPREADS.items():
            both = steps(rows, classes, width, spread)
            turns = [[milliseconds(loss) for loss in both] for _ in range(arguments.turns + 1)][1:]
            mine, plain = (statistics.median(times) for times in zip(*turns, strict=True))
            ratios[f"{rows} x {classes} x {width}, {name}"] = round(mine / plain, 3)
            print(
                f"{rows} rows, {classes:>6,} classes, {width:>3} features, {name:>4}: ours {mine:7.2f} ms, torch's "
                f"{plain:7.2f} ms, ratio {mine / plain:.2f}"
            )
    print(json.dumps({"time_ratio": ratios}))


if __name__ == "__main__":
    main()

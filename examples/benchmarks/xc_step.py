"""A step of extreme classification under the Trainer against the dense step, as the number of classes grows.

The dense step is the published code's: a weight of K rows indexed by the batch's labels, its dense gradient by
autograd, ``torch.optim.SGD``, ν in a table. Ours is ``Trainer.fit`` of ``ExtremeClassificationTask`` on the same
batches: 128 random rows of 512 features and 17,091,657 anchors, SCENT, in-batch negatives. One thread, the same run.
``flatness`` is our step at the most classes over the one at the fewest; ``peak_extra_gb`` the largest resident memory
of a process that trains at the most classes, beyond what importing takes, the weights and the table of ν (negative,
because the pages of rows that no batch touched were never written).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from torch import Tensor

from scent_lightning.duals import SCENT
from scent_lightning.lightning_cli import NoProfiler
from scent_lightning.tasks import ExtremeClassificationTask

CLASSES = (10_000, 100_000, 360_232)
FEATURES, BATCH, ANCHORS, LOG_ALPHA = 512, 128, 17_091_657, 12.0


def batches(classes: int, steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Random rows, a few hundred different ones."""
    generator = torch.Generator().manual_seed(0)
    pool = [
        (
            torch.nn.functional.normalize(torch.randn(BATCH, FEATURES, generator=generator)),
            torch.randint(classes, (BATCH,), generator=generator),
            torch.randint(ANCHORS, (BATCH,), generator=generator),
        )
        for _ in range(min(steps, 20))
    ]
    for step in range(steps):
        yield pool[step % len(pool)]


class Batches(torch.utils.data.IterableDataset[Any]):
    """The same, for the Trainer."""

    def __init__(self, classes: int, steps: int) -> None:
        self.classes, self.steps = classes, steps

    def __iter__(self) -> Iterator[Any]:
        return batches(self.classes, self.steps)


class Clock(L.Callback):
    """Time of every step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.perf_counter())


def median_step(times: list[float]) -> float:
    """Median time between steps in ms, the first ones left out."""
    later = times[len(times) // 5 :]
    return 1e3 * statistics.median(b - a for a, b in pairwise(later))


def dense(classes: int, steps: int) -> float:
    """Milliseconds a step of the published kind."""
    weight = torch.nn.Parameter(torch.zeros(classes, FEATURES))
    nu = torch.zeros(ANCHORS)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    times = [time.perf_counter()]
    for features, labels, index in batches(classes, steps):
        rows = weight[labels]
        logits = features @ rows.T
        scores = logits - logits.diagonal().unsqueeze(1)
        others = labels.unsqueeze(0) != labels.unsqueeze(1)
        with torch.no_grad():
            log_mean = scores.masked_fill(~others, -torch.inf).logsumexp(1) - others.sum(1).log()
            old = nu[index]
            nu[index] = (
                old
                + torch.logaddexp(LOG_ALPHA + log_mean, torch.zeros(()))
                - torch.logaddexp(LOG_ALPHA + old, torch.zeros(()))
            )
        weights = torch.exp(scores - nu[index].unsqueeze(1)).masked_fill(~others, 0.0)
        loss = (weights.sum(1) / others.sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        times.append(time.perf_counter())
    return median_step(times)


def ours(classes: int, steps: int) -> float:
    """Milliseconds a step of ``Trainer.fit``."""
    task = ExtremeClassificationTask(FEATURES, classes, ANCHORS, SCENT(LOG_ALPHA), lr=1.0)
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
        profiler=NoProfiler(),
    )
    trainer.fit(task, Batches(classes, steps))
    return median_step(clock.times)


def peak_extra_gb(classes: int, steps: int) -> float:
    """Largest resident memory of this process in GB, beyond the start, the weights and the table."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ours(classes, steps)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return (grown - 4 * classes * FEATURES - 5 * ANCHORS) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="our steps for each number of classes")
    parser.add_argument("--dense-steps", type=int, default=12, help="dense steps for each number of classes")
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES, help="numbers of classes, rising")
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if arguments.peak_of:
        print(peak_extra_gb(arguments.peak_of, 50))
        return
    print(__doc__)
    ratios, steps = {}, {}
    for classes in arguments.classes:
        steps[classes] = ours(classes, arguments.steps)
        slow = dense(classes, arguments.dense_steps)
        ratios[str(classes)] = round(slow / steps[classes], 1)
        print(f"{classes:>7,} classes: dense {slow:8.2f} ms a step, Trainer.fit {steps[classes]:.2f} ms")
    command = [sys.executable, __file__, "--peak-of", str(arguments.classes[-1])]
    peak = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    flatness = steps[arguments.classes[-1]] / steps[arguments.classes[0]]
    figures = {"dense_over_sparse": ratios, "flatness": round(flatness, 3), "peak_extra_gb": round(peak, 3)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

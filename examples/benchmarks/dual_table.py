"""What the table of ν costs as the training set grows: a step, memory, writing and reading a checkpoint.

A step is 128 anchors drawn at random, without repeats as a sampler draws them, with 127 scores each: SCENT's update of
the table in main memory, the loss, and the gradient of the scores. The sizes take turns in one process of one thread;
``step_ratio`` is the median over the turns of the time at the largest size over the time at the smallest.

Memory is measured at the largest size, each number in a fresh process: ``bytes_per_anchor`` is what the process grows
by when the table is made and used; ``save_extra_gb`` and ``load_extra_gb`` are how much more than that the process
holds at its peak while ``Trainer.save_checkpoint`` writes the table and while ``Trainer.validate(ckpt_path=...)`` reads
it, with AtomicCheckpointIO. The pages of the checkpoint that are mapped while it is read are counted apart: they are
the system's cache of the file, shared by all processes and given up when memory is short.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from fresh_process import in_a_process
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO
from torch import Tensor

from scent_lightning.checkpoint import AtomicCheckpointIO
from scent_lightning.duals import SCENT, DualVariable, DualVariableMixin

ROWS, SAMPLES = 128, 127
WAYS: dict[str, type[CheckpointIO]] = {"AtomicCheckpointIO": AtomicCheckpointIO, "Lightning's own": TorchCheckpointIO}


class Table(DualVariableMixin, L.LightningModule):
    """A module that is hardly more than its table."""

    def __init__(self, num_anchors: int) -> None:
        super().__init__()
        self.add_dual("nu", num_anchors, SCENT(log_alpha=0.0), placement="cpu")

    @property
    def table(self) -> DualVariable:
        return cast(DualVariable, self.duals["nu"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def in_use() -> tuple[int, int]:
    """Bytes of main memory that are this process's own, and bytes of files that it has mapped and read."""
    status = Path("/proc/self/status").read_text()
    own, mapped = (int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return own, mapped


def peak_growth(work: Callable[[], Any]) -> tuple[int, int]:
    """How far both numbers of :func:`in_use` rise above their start while ``work`` runs."""
    start, peak, done = in_use(), [0, 0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[:] = [max(pair) for pair in zip(peak, in_use(), strict=True)]

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return max(peak[0] - start[0], 0), max(peak[1] - start[1], 0)


def distinct(num_anchors: int) -> Tensor:
    """Indices of a batch."""
    while True:
        index = torch.randint(num_anchors, (ROWS,))
        if len(set(index.tolist())) == ROWS:
            return index


def steps(variable: DualVariable, scores: Tensor, number: int) -> float:
    """Seconds a step."""
    indices = [distinct(variable.num_anchors) for _ in range(number)]
    start = time.perf_counter()
    for index in indices:
        scores.grad = None
        variable.entropic_risk(scores, index).backward()  # type: ignore[no-untyped-call]
    return (time.perf_counter() - start) / number


def times(sizes: list[int], turns: int, number: int) -> list[list[float]]:
    """Seconds a step at each size in each turn."""
    variables = [DualVariable(size, SCENT(log_alpha=0.0), placement="cpu") for size in sizes]
    scores = torch.randn(ROWS, SAMPLES, requires_grad=True)
    for variable in variables:
        steps(variable, scores, number)
    return [[steps(variable, scores, number) for variable in variables] for _ in range(turns)]


def memory(num_anchors: int) -> float:
    """Bytes an anchor, with the table in use."""
    scores = torch.randn(ROWS, SAMPLES, requires_grad=True)
    steps(DualVariable(10_000, SCENT(log_alpha=0.0), placement="cpu"), scores, 100)
    start = sum(in_use())
    variable = DualVariable(num_anchors, SCENT(log_alpha=0.0), placement="cpu")
    steps(variable, scores, 1000)
    return (sum(in_use()) - start) / num_anchors


def trainer_with(way: str, model: L.LightningModule) -> L.Trainer:
    """A Trainer that has run and is attached to ``model``."""
    trainer = L.Trainer(
        accelerator="cpu",
        plugins=[WAYS[way]()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.validate(model, torch.zeros(1), verbose=False)
    return trainer


def save(way: str, path: str, num_anchors: int) -> tuple[int, int]:
    """Peak growth while a checkpoint is written."""
    model = Table(num_anchors)
    model.table.nu.uniform_()
    model.table.visited.fill_(True)
    trainer = trainer_with(way, model)
    return peak_growth(lambda: trainer.save_checkpoint(path))


def load(way: str, path: str, num_anchors: int) -> tuple[int, int]:
    """Peak growth while it is read."""
    model = Table(num_anchors)
    trainer = trainer_with(way, model)
    growth = peak_growth(lambda: trainer.validate(model, torch.zeros(1), ckpt_path=path, verbose=False))
    assert bool(model.table.visited.all())
    return growth


def measured(work: Callable[..., Any], *arguments: Any) -> Any:
    """What ``work`` gives in one thread of a process of its own."""
    return in_a_process(_alone, work, *arguments)


def _alone(work: Callable[..., Any], *arguments: Any) -> Any:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    return work(*arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [10**power for power in range(4, 9)]
    parser.add_argument(
        "--anchors", type=int, nargs="+", default=sizes, help="sizes of the table, ascending from 10,000 on"
    )
    parser.add_argument("--turns", type=int, default=15, help="turns of each size")
    parser.add_argument("--steps", type=int, default=200, help="steps of a turn")
    arguments = parser.parse_args()
    print(__doc__)
    sizes = arguments.anchors
    seconds = measured(times, sizes, arguments.turns, arguments.steps)
    ratios = [statistics.median(turn[i] / turn[0] for turn in seconds) for i in range(len(sizes))]
    for i, size in enumerate(sizes):
        middle = 1e6 * statistics.median(turn[i] for turn in seconds)
        print(f"{size:>11,} anchors: {middle:6.1f} µs a step, {ratios[i]:.3f} times that of {sizes[0]:,}")
    per_anchor = measured(memory, sizes[-1])
    extra: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            written, read = (measured(work, way, f"{folder}/a.ckpt", sizes[-1]) for work in (save, load))
            extra[way] = written[0] / 1e9, read[0] / 1e9
            print(
                f"{way:>18}: beyond the table of {per_anchor * sizes[-1] / 1e9:.3f} GB it takes {extra[way][0]:.3f} GB "
                f"to write it, {extra[way][1]:.3f} GB to read it and {read[1] / 1e9:.3f} GB of file mapped"
            )
    saved, loaded = (round(value, 3) for value in extra["AtomicCheckpointIO"])
    figures = {"step_ratio": round(ratios[-1], 3), "bytes_per_anchor": round(per_anchor, 3)}
    print(json.dumps({**figures, "save_extra_gb": saved, "load_extra_gb": loaded}))


if __name__ == "__main__":
    main()

"""A fine-tuning step by partial AUC under the Trainer against the same step with binary cross-entropy.

The same batches of 32 positives and 32 negatives, the same network, SCENT, one thread, both in turn in one run: a
ResNet-18 of a quarter of the width on images of 32 pixels, trained whole ("network") and with the backbone frozen
("frozen"), and a linear head on 512 features ("linear"), where there is next to nothing but the loss.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from scent_lightning.data import StratifiedBatchSampler
from scent_lightning.duals import SCENT
from scent_lightning.lightning_cli import NoProfiler
from scent_lightning.modules import SmallImageResNet
from scent_lightning.tasks import PartialAUCTask

ROWS, POSITIVES, HALF, FEATURES = 2048, 512, 32, 512


class Rows(torch.utils.data.Dataset[Any]):
    """Random inputs, fetched by lists of indices."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(ROWS, *shape, generator=generator)
        self.labels = (torch.arange(ROWS) < POSITIVES).long()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: Any) -> Any:
        rows = torch.as_tensor(index)
        return self.inputs[rows], self.labels[rows], rows


class Clock(L.Callback):
    """Time of every step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.perf_counter())


def same(batch: Any) -> Any:
    return batch


def step_ms(kind: str, loss: Any, steps: int) -> float:
    """Median milliseconds of a step of ``Trainer.fit``."""
    rows = Rows((FEATURES,) if kind == "linear" else (3, 32, 32))
    sampler = StratifiedBatchSampler(rows.labels, HALF, HALF, num_batches=steps)
    torch.manual_seed(0)
    task = PartialAUCTask(
        ROWS,
        SCENT(6.0, max_log_weight=2.0),
        num_features=FEATURES if kind == "linear" else None,
        network=None if kind == "linear" else SmallImageResNet(width=16),
        freeze_backbone=kind == "frozen",
        loss=loss,
        lr=1e-3,
        weight_step="gradient",
    )
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
        profiler=NoProfiler(),
    )
    trainer.fit(task, DataLoader(rows, sampler=sampler, batch_size=None, collate_fn=same))
    times = clock.times[len(clock.times) // 5 :]
    return 1e3 * statistics.median(b - a for a, b in pairwise(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps",
        type=int,
        default=60,
        help="steps of a turn with the network; 20 times as many with the linear head (60)",
    )
    parser.add_argument("--turns", type=int, default=3, help="turns of each kind; the median counts (3)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(__doc__)
    ratios = {}
    for kind in ("network", "frozen", "linear"):
        steps = arguments.steps * (20 if kind == "linear" else 1)
        turns = [
            (step_ms(kind, "cross_entropy", steps), step_ms(kind, "partial_auc", steps)) for _ in range(arguments.turns)
        ]
        plain, ours = (statistics.median(times) for times in zip(*turns, strict=True))
        ratios[kind] = round(ours / plain, 3)
        print(f"{kind:>8}: cross-entropy {plain:7.2f} ms a step, partial AUC {ours:7.2f} ms, ratio {ours / plain:.2f}")
    print(json.dumps({"partial_auc_over_cross_entropy": ratios}))


if __name__ == "__main__":
    main()

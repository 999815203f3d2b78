"""Resident memory and first batch of training on a memory-mapped file of 4 GB.

Four million rows of 512 float16 features are written to a temporary folder; a fresh process then trains on them with
FeatureDataModule, 100,000 classes, SCENT and in-batch negatives, in random order. ``first_batch_s`` is the time from
making the data module to the first batch; ``peak_extra_gb`` the largest resident memory of that process beyond what
importing takes, the weights and the table of ν.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import lightning as L
import numpy as np
import torch

from scent_lightning.data import FeatureDataModule
from scent_lightning.duals import SCENT
from scent_lightning.tasks import ExtremeClassificationTask

FEATURES, CLASSES = 512, 100_000


def write(folder: Path, rows: int) -> None:
    """A training split of random rows."""
    split = folder / "train"
    split.mkdir()
    generator = np.random.default_rng(0)
    block = generator.standard_normal((20_000, FEATURES)).astype(np.float16)
    features = np.lib.format.open_memmap(split / "features.npy", mode="w+", dtype=np.float16, shape=(rows, FEATURES))
    for start in range(0, rows, len(block)):
        features[start : start + len(block)] = block[: rows - start]
    features.flush()
    np.save(split / "labels.npy", generator.integers(CLASSES, size=rows))


def train(folder: str, steps: int) -> dict[str, float]:
    """First batch and peak memory of this process."""
    warnings.simplefilter("ignore")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    data = FeatureDataModule(folder, num_classes=CLASSES)
    next(iter(data.train_dataloader()))
    first = time.perf_counter() - start
    task = ExtremeClassificationTask(FEATURES, CLASSES, data.num_anchors, SCENT(0.0, max_log_weight=2.0), lr=0.1)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, datamodule=data)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    extra = (grown - 4 * CLASSES * FEATURES - 5 * data.num_anchors) / 1e9
    return {"first_batch_s": round(first, 3), "peak_extra_gb": round(extra, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000, help="rows of 1 KB (4,000,000: 4 GB)")
    parser.add_argument("--steps", type=int, default=2000, help="training steps of 128 rows")
    parser.add_argument("--train-on", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train_on:
        torch.set_num_threads(1)
        print(json.dumps(train(arguments.train_on, arguments.steps)))
        return
    print(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), arguments.rows)
        command = [sys.executable, __file__, "--train-on", folder, "--steps", str(arguments.steps)]
        print(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()

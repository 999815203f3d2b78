"""In-batch negatives with and without the correction, on a softmax of frequent and rare classes whose optimum is known.

20,000 rows of 16 features and a constant, with labels drawn from a softmax of them over 1,000 classes whose frequencies
follow Zipf's law, and one row of each class besides: the first has some 1,100 rows, hundreds have one or two. The
softmax cross-entropy of the training rows is convex in the weights, and its minimum is found by L-BFGS in float64. Then
each method trains for the same epochs with in-batch negatives and batches of 128 rows, all else by default, and its
exact cross-entropy over all classes is compared with the minimum: SCENT with its step size found and BSGD, each
plain and corrected.

Plain, the classes of a batch stand for all of them, and frequent ones are in every batch: what is minimised is another
loss. Corrected, the mean over the batch is right in expectation; BSGD still has the bias of its logarithm.

    python examples/softmax_known_optimum.py

Results go to a CSV file as the runs end; runs that are in it are not run again. The last line is JSON: the minimum, and
for each method how far above it its cross-entropy is, as a fraction of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from resumable import bare_trainer, dual_update, read_rows, run_missing, silent_process
from scipy.optimize import minimize
from torch import Tensor

from scent_lightning.data import FeatureDataModule
from scent_lightning.modules.class_sampled_linear import Correction
from scent_lightning.tasks import ExtremeClassificationTask

CLASSES, FEATURES, ROWS, BATCH, BLOCK = 1000, 16, 20_000, 128, 2000
CORRECTIONS: dict[str, Correction] = {
    "BSGD": "none",
    "SCENT": "none",
    "BSGD corrected": "frequency",
    "SCENT corrected": "frequency",
}


def write_rows(folder: Path, rows: int, classes: int) -> None:
    """Rows and labels, as FeatureDataModule reads them."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64) / FEATURES**0.5
    features = torch.cat([features, torch.ones(rows, 1, dtype=torch.float64)], dim=1)
    directions = 3 * torch.randn(classes, FEATURES, generator=generator, dtype=torch.float64)
    log_frequencies = -torch.arange(1, classes + 1, dtype=torch.float64).log()
    logits = features @ torch.cat([directions, log_frequencies.unsqueeze(1)], dim=1).T
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
    labels[:classes] = torch.arange(classes)
    (folder / "train").mkdir(parents=True)
    np.save(folder / "train" / "features.npy", features.float().numpy())
    np.save(folder / "train" / "labels.npy", labels.numpy())


def read(folder: Path) -> tuple[Tensor, Tensor]:
    """Features, float32, and labels."""
    return tuple(torch.from_numpy(np.load(folder / "train" / f"{name}.npy")) for name in ("features", "labels"))  # type: ignore[return-value]


def blocks(features: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows at a time: the logits of all would be 160 MB."""
    for start in range(0, len(labels), BLOCK):
        yield features[start : start + BLOCK], labels[start : start + BLOCK]


def cross_entropy_and_gradient(
    flat: npt.NDArray[np.float64], features: Tensor, labels: Tensor, classes: int
) -> tuple[float, npt.NDArray[np.float64]]:
    """Mean over the rows, a block of them at a time."""
    weight = torch.from_numpy(flat).view(classes, -1)
    total, gradient = 0.0, torch.zeros_like(weight)
    for rows, own in blocks(features, labels):
        logits = rows @ weight.T
        logits -= logits.amax(dim=1, keepdim=True)
        own_logits = logits.gather(1, own.unsqueeze(1))
        sums = logits.exp_().sum(dim=1, keepdim=True)
        total += float((sums.log() - own_logits).sum())
        logits /= sums
        logits.scatter_add_(1, own.unsqueeze(1), torch.full_like(own_logits, -1.0))
        gradient += logits.T @ rows
    return total / len(labels), (gradient / len(labels)).flatten().numpy()


def optimum(folder: Path) -> float:
    """The least cross-entropy, kept in a file."""
    kept = folder / "optimum.json"
    if kept.exists():
        return float(json.loads(kept.read_text()))
    features, labels = read(folder)
    features, counts = features.double(), torch.bincount(labels).double()
    # A class of few rows has a small part in the loss and its curvature: by this scale all have equal ones.
    scale = (1 / counts.sqrt()).repeat_interleave(features.shape[1]).numpy()

    def scaled(flat: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        value, gradient = cross_entropy_and_gradient(flat * scale, features, labels, len(counts))
        return value, gradient * scale

    options = {"maxiter": 400, "maxfun": 500, "ftol": 1e-9, "gtol": 1e-8, "maxcor": 30}
    found = minimize(scaled, np.zeros(len(scale)), method="L-BFGS-B", jac=True, options=options)
    print(f"{found.nfev} evaluations, largest entry of the gradient {np.abs(found.jac / scale).max():.1e}")
    kept.write_text(json.dumps(found.fun))
    return float(found.fun)


def run(folder: str, method: str, seed: int, epochs: int, lr: float) -> list[dict[str, Any]]:
    """Train once; the exact cross-entropy of the training rows at the end."""
    silent_process(seed)
    data = FeatureDataModule(folder, batch_size=BATCH)
    task = ExtremeClassificationTask(
        data.num_features,
        data.num_classes,
        data.num_anchors,
        dual_update(method, {}),
        lr=lr,
        correction=CORRECTIONS[method],
    )
    trainer = bare_trainer(accelerator="cpu", max_epochs=epochs, limit_val_batches=0)
    trainer.fit(task, datamodule=data)
    features, labels = read(Path(folder))
    total = 0.0
    with torch.no_grad():
        for rows, own in blocks(features, labels):
            total += task.exact_cross_entropy(rows, own)[0].double().sum().item()
    found = {"method": method, "seed": seed, "epochs": epochs, "lr": task.lr, "cross_entropy": total / len(labels)}
    return [{"rows": data.num_anchors, **found}]


def default_rate(classes: int) -> float:
    """The task's own learning rate."""
    return ExtremeClassificationTask.learning_rates["proximal"].lr * classes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"training rows ({ROWS})")
    parser.add_argument("--classes", type=int, default=CLASSES, help=f"classes to draw labels of ({CLASSES})")
    parser.add_argument("--epochs", type=int, default=60, help="epochs of a run (60)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds (0)")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each (1)")
    parser.add_argument("--lr", type=float, help="learning rate of all (the task's own)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/softmax_known_optimum"), help="folder of the rows and the CSV file"
    )
    arguments = parser.parse_args()
    lr = default_rate(arguments.classes) if arguments.lr is None else arguments.lr
    torch.set_num_threads(1)
    folder, path = arguments.out / f"{arguments.rows}_{arguments.classes}", arguments.out / "runs.csv"
    if not folder.exists():
        write_rows(folder, arguments.rows, arguments.classes)
    least = optimum(folder)
    done = {(row["rows"], row["method"], row["seed"], row["epochs"], row["lr"]) for row in read_rows(path)}
    todo = [
        (str(folder), method, seed, arguments.epochs, lr)
        for seed in arguments.seeds
        for method in CORRECTIONS
        if (arguments.rows, method, seed, arguments.epochs, lr) not in done
    ]
    run_missing(run, todo, path, arguments.workers)
    which = arguments.rows, arguments.epochs, lr
    rows = [row for row in read_rows(path) if (row["rows"], row["epochs"], row["lr"]) == which]
    print(f"\nleast cross-entropy {least:.5f}\n\n| method | cross-entropy | above the least | learning rate |")
    print("| --- | --- | --- | --- |")
    gaps = {}
    for method in CORRECTIONS:
        mine = [row for row in rows if row["method"] == method and row["seed"] in arguments.seeds]
        reached = statistics.mean(row["cross_entropy"] for row in mine)
        gaps[method] = round(reached / least - 1, 5)
        print(f"| {method} | {reached:.4f} | {100 * gaps[method]:.2f} % | {mine[0]['lr']:g} |")
    print(json.dumps({"least": round(least, 6), "above": gaps}))


if __name__ == "__main__":
    main()

"""Compare the six dual updates on extreme classification: cross-entropy against epochs, as in the paper's figure.

The data are a folder that FeatureDataModule reads, made for the CJK glyphs (20,902 classes, 250,824 rows of 64
features): 20 epochs, batches of 128, in-batch negatives, cosine learning rate, gradient steps, each method at its
SETTINGS, which were tuned on the same data; SCENT also with log α found, and with nothing set at all. --methods also
takes the others with SCENT's guard and with its proximal step, and all six with momentum. After every epoch the exact
softmax cross-entropy and top-1 accuracy over all classes are taken on fixed random training and validation rows.

Results go to a CSV file as the runs end; runs that are in it are not run again. At the end a table is printed and a
figure drawn.

    python examples/compare_xc.py --path data/glyphs --workers 2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from resumable import bare_trainer, dual_update, of_seeds, read_rows, run_missing, settings, silent_process, spread
from torch import Tensor

from scent_lightning.data import FeatureDataModule
from scent_lightning.errors import DualDivergenceError
from scent_lightning.figures import look_of, mean_and_range, new_figure, note, save, style
from scent_lightning.tasks import ExtremeClassificationTask

DEFAULT = "SCENT default"
# Learning rate and arguments of the dual update, the best of what was tried for 10 epochs on the glyphs: learning rates
# 100, 200 and 300 (500 for SCENT), γ 0.8, α 1 with a cosine schedule as published, log α 14, 16 and 18. Auto has
# SCENT's learning rate; "default" has the task's own, its proximal steps and its loss, into which the own class comes.
SETTINGS: dict[str, tuple[float | None, dict[str, Any]]] = {
    "BSGD": (100.0, {}),
    "ASGD": (300.0, {"alpha": 1.0, "schedule": "cosine"}),
    "SoftplusASGD": (300.0, {"alpha": 1.0, "rho": 1e-3, "schedule": "cosine"}),
    "UMax": (300.0, {"alpha": 1.0, "delta": 1.0, "schedule": "cosine"}),
    "SOX": (200.0, {"gamma": 0.8}),
    "SCENT": (300.0, {"log_alpha": 16.0, "max_log_weight": 1.0}),
    "SCENT auto": (300.0, {"log_alpha": "auto"}),
    DEFAULT: (None, {}),
}
# The same on equal terms: "guard" after a method's name adds the guard, "proximal" the guard and the weights' step that
# SCENT has with nothing set.
GUARD = 1.0
UNGUARDED = ("BSGD", "ASGD", "SoftplusASGD", "UMax", "SOX")
# "momentum" adds SGD's, 0.9, and takes a tenth of the learning rate.
MOMENTUM = 0.9
MORE = tuple(f"{method} {added}" for added in ("guard", "proximal") for method in UNGUARDED)
MORE += tuple(f"{method} momentum" for method in (*UNGUARDED, "SCENT"))
ROWS = 8000  # of each split, looked at after every epoch


def setting(method: str) -> tuple[float | None, dict[str, Any]]:
    """Learning rate (None: the task's own, with proximal steps) and arguments of the dual update of a row."""
    if method not in MORE:
        return SETTINGS[method]
    name, _, added = method.partition(" ")
    lr, arguments = SETTINGS[name]
    if added == "momentum":
        return (lr or 0.0) * (1 - MOMENTUM), arguments
    return None if added == "proximal" else lr, {**arguments, "max_log_weight": GUARD}


class DenseSGD(torch.optim.SGD):
    """SGD whose momentum moves a class's row on while the class is in no batch.

    The task's own, RowSparseSGD, moves no row that has no gradient. A class is in one batch of 160 here, when nothing
    is left of the momentum: with it, a run is the same as without momentum.
    """

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        def dense() -> float | None:
            loss = None if closure is None else closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and parameter.grad.is_sparse:
                        parameter.grad = parameter.grad.to_dense()
            return loss

        return super().step(dense)  # type: ignore[arg-type,no-any-return]


class Curve(L.Callback):
    """Exact cross-entropy and top-1 accuracy on fixed rows, after every epoch."""

    def __init__(self, rows: dict[str, tuple[Tensor, Tensor]]) -> None:
        self.rows = rows
        self.found: list[dict[str, Any]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, ExtremeClassificationTask)
        row: dict[str, Any] = {"epoch": trainer.current_epoch + 1}
        for split, (features, labels) in self.rows.items():
            with torch.no_grad():
                cross_entropy, rank = pl_module.exact_cross_entropy(features, labels)
            row |= {
                f"{split}_cross_entropy": cross_entropy.mean().item(),
                f"{split}_top1": (rank < 1).double().mean().item(),
            }
        self.found.append(row)


def fixed_rows(path: str, split: str) -> tuple[Tensor, Tensor]:
    """The same random rows of a split every time."""
    features = np.load(f"{path}/{split}/features.npy", mmap_mode="r")
    labels = np.load(f"{path}/{split}/labels.npy", mmap_mode="r")
    chosen = np.random.default_rng(0).permutation(len(labels))[:ROWS]
    return torch.from_numpy(features[chosen].astype(np.float32)), torch.from_numpy(labels[chosen].astype(np.int64))


def run(method: str, seed: int, epochs: int, path: str) -> list[dict[str, Any]]:
    """Train once; a row for each epoch."""
    silent_process(seed)
    lr, arguments = setting(method)
    dual = dual_update(method, arguments)
    data = FeatureDataModule(path, batch_size=128)
    sizes = data.num_features, data.num_classes, data.num_anchors
    more: dict[str, Any] = {"weight_step": "proximal" if lr is None else "gradient"}
    if method != DEFAULT:
        more["include_target"] = False  # the published loss
    if method.endswith("momentum"):
        more["optimizer"] = partial(DenseSGD, lr=lr or 0.0, momentum=MOMENTUM)
    task = ExtremeClassificationTask(*sizes, dual, lr=lr, **more)
    curve = Curve({split: fixed_rows(path, split) for split in ("train", "val")})
    trainer = bare_trainer(
        accelerator="cpu",
        max_epochs=epochs,
        limit_val_batches=0,
        callbacks=[curve],
    )
    try:
        trainer.fit(task, datamodule=data)
    except DualDivergenceError:
        names = [f"{split}_{name}" for split in ("train", "val") for name in ("cross_entropy", "top1")]
        curve.found.append({"epoch": epochs, **dict.fromkeys(names, float("nan"))})
    return [{"method": method, "seed": seed, "epochs": epochs, **row} for row in curve.found]


def table(rows: list[dict[str, Any]], methods: list[str], epochs: int) -> str:
    """Means over the seeds after the last epoch, and of several their deviation, as a Markdown table."""
    names = ("train_cross_entropy", "train_top1", "val_cross_entropy", "val_top1")
    lines = ["| method | " + " | ".join(name.replace("_", " ") for name in names) + " | settings |"]
    lines.append("| --- |" + " --- |" * (len(names) + 1))
    for method in methods:
        final = [row for row in rows if row["method"] == method and row["epoch"] == epochs]
        found = [spread([row[name] for row in final]) for name in names]
        said = [f"{mean:.3f} ± {deviation:.3f}" if len(final) > 1 else f"{mean:.3f}" for mean, deviation in found]
        lines.append(f"| {method} | " + " | ".join(said) + f" | {settings(*setting(method))} |")
    return "\n".join(lines)


@style()
def figure(rows: list[dict[str, Any]], methods: list[str], path: Path) -> None:
    """Cross-entropy against epochs, training and validation."""
    figure, panels = new_figure(1, 2, size=(4.6, 3.6))
    for panel, split in zip(panels[0], ("train", "val"), strict=True):
        for method in methods:
            mine = [row for row in rows if row["method"] == method]
            epochs = sorted({row["epoch"] for row in mine})
            values = [[row[f"{split}_cross_entropy"] for row in mine if row["epoch"] == epoch] for epoch in epochs]
            mean_and_range(
                panel, epochs, values, method, **look_of(method, methods), markevery=max(len(epochs) // 5, 1)
            )
        panel.set(yscale="log", xlabel="epoch", title={"train": "training rows", "val": "validation rows"}[split])
        panel.xaxis.get_major_locator().set_params(integer=True)
    panels[0, 0].set_ylabel("softmax cross-entropy over all classes (nats)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center")
    seeds = sorted({row["seed"] for row in rows})
    note(figure, f"{ROWS:,} rows of each split after every epoch; {of_seeds(seeds)}")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default="data/glyphs", help="folder with train and val (data/glyphs)")
    parser.add_argument(
        "--methods", nargs="+", default=list(SETTINGS), choices=[*SETTINGS, *MORE], help="which (those of SETTINGS)"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds (0)")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of a run (20)")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each (1)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/compare_xc"), help="folder of the CSV file and the figure"
    )
    arguments = parser.parse_args()
    path = arguments.out / "runs.csv"
    done = {(row["method"], row["seed"], row["epochs"]) for row in read_rows(path)}
    todo = [
        (method, seed, arguments.epochs, arguments.path)
        for seed in arguments.seeds
        for method in arguments.methods
        if (method, seed, arguments.epochs) not in done
    ]
    run_missing(run, todo, path, arguments.workers)
    rows = [r for r in read_rows(path) if r["seed"] in arguments.seeds and r["epochs"] == arguments.epochs]
    print(table(rows, arguments.methods, arguments.epochs))
    figure(rows, arguments.methods, arguments.out / "cross_entropy.png")
    print(f"runs: {path}\nfigure: {arguments.out / 'cross_entropy.png'}")


if __name__ == "__main__":
    main()

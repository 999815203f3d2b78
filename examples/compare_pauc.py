"""Compare cross-entropy and the six dual updates on partial AUC: imbalanced CIFAR-10, as in the paper's experiment.

Two stages. A ResNet-18 is trained with cross-entropy on the imbalanced training set (the first half of the classes is
negative, of the second half, positive, 80 % is removed), on two cores a quarter as wide and for 15 epochs. Then it is
frozen, its features are written to files once, and each method trains a linear classifier from scratch for 60 epochs of
batches of 32 + 32, with its SETTINGS; "SCENT default" is the task with nothing set, its proximal step and the learning
rate that it finds. Reported: the training objective, exact over all positives × negatives, and the partial AUC
(FPR ≤ 0.3) on the balanced test set; "cross-entropy" is the classifier of the first stage as it is. --momentum gives
the second stage momentum, at learning rates that are 1 − momentum times as large.

What is done is kept in the folder --out: the checkpoint and the features of each seed, and a CSV file of the runs.

    python examples/compare_pauc.py --path data/cifar10 --seeds 0 1 2 --workers 2

A GPU takes the published network: --width 64 --pretrain-epochs 60.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from resumable import bare_trainer, dual_update, read_rows, run_missing, settings, silent_process, spread
from torch import Tensor

from scent_lightning.data import ImbalancedImageDataModule
from scent_lightning.duals import BSGD
from scent_lightning.errors import DualDivergenceError
from scent_lightning.metrics.partial_auc import partial_auc, partial_auc_objective
from scent_lightning.modules import SmallImageResNet
from scent_lightning.tasks import PartialAUCTask

MARGIN, MAX_FPR, TAUS = 0.5, 0.3, (0.05, 0.1)
PRETRAINING, DEFAULT = "cross-entropy", "SCENT default"
POSITIVE = ["dog", "frog", "horse", "ship", "truck"]  # of CIFAR-10

# Learning rate and arguments of the dual update for each τ, the best objective of what was tried at seed 0: learning
# rates 1e-3, 1e-2, 0.1 and 1, α 0.03, 0.2 and 1 (cosine, as published) with δ 1 and ρ 1e-3, γ 0.1, 0.3 and 0.7, log α
# from −F/τ to 7 below it.
COSINE = {"schedule": "cosine"}
SETTINGS: dict[float, dict[str, tuple[float, dict[str, Any]]]] = {
    0.05: {
        "BSGD": (1e-3, {}),
        "ASGD": (0.1, {"alpha": 0.03, **COSINE}),
        "SoftplusASGD": (0.1, {"alpha": 0.2, "rho": 1e-3, **COSINE}),
        "UMax": (1.0, {"alpha": 0.03, "delta": 1.0, **COSINE}),
        "SOX": (0.1, {"gamma": 0.1}),
        "SCENT": (0.1, {"log_alpha": -5.0, "max_log_weight": 2.0, **COSINE}),
    },
    0.1: {
        "BSGD": (1.0, {}),
        "ASGD": (0.1, {"alpha": 0.2, **COSINE}),
        "SoftplusASGD": (0.1, {"alpha": 0.2, "rho": 1e-3, **COSINE}),
        "UMax": (0.1, {"alpha": 1.0, "delta": 1.0, **COSINE}),
        "SOX": (0.1, {"gamma": 0.1}),
        "SCENT": (1.0, {"log_alpha": -1.0, "max_log_weight": 2.0, **COSINE}),
    },
}


def pretrain(
    path: str, positive: list[str | int], seed: int, width: int, epochs: int, folder: Path
) -> list[dict[str, Any]]:
    """First stage: the checkpoint, the features of both splits, and the scores of its own classifier."""
    silent_process(seed)
    cifar = {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616]}
    # One positive row in six, as in the data.
    data = ImbalancedImageDataModule(
        path,
        positives_per_batch=11,
        positive_classes=positive,
        removed_positives=0.8,
        seed=seed,
        **cast(Any, cifar),
    )
    data.setup("fit")
    network = SmallImageResNet(width=width)
    task = PartialAUCTask(
        data.num_anchors,
        BSGD(),
        network=network,
        loss="cross_entropy",
        lr=0.05,
        weight_step="gradient",
        momentum=0.9,
        weight_decay=5e-4,
    )
    trainer = bare_trainer(
        max_epochs=epochs,
        limit_val_batches=0,
    )
    trainer.fit(task, datamodule=data)
    folder.mkdir(parents=True, exist_ok=True)
    trainer.save_checkpoint(folder / "pretrained.ckpt")
    network.eval()
    for split, loader in (("train", data.train_eval_dataloader()), ("test", data.test_dataloader())):
        features, scores, labels = [], [], []
        for images, label, _ in cast(Any, loader):
            with torch.no_grad():
                features.append(network.features(images.to(task.device)).cpu())
                scores.append(network.classifier(features[-1].to(task.device)).flatten().sigmoid().cpu())
            labels.append(label)
        (folder / split).mkdir(exist_ok=True)
        np.save(folder / split / "features.npy", torch.cat(features).numpy())
        np.save(folder / split / "labels.npy", torch.cat(labels).numpy())
        np.save(folder / split / "scores.npy", torch.cat(scores).numpy())
    return [{"seed": seed, "width": width, "epochs": epochs}]


def figures(folder: Path, tau: float, scores: dict[str, Tensor]) -> dict[str, float]:
    """Training objective and test partial AUC of the scores of both splits."""
    labels = {split: torch.from_numpy(np.load(folder / split / "labels.npy")) for split in scores}
    positive = labels["train"] == 1
    train = scores["train"].double()
    objective = partial_auc_objective(train[positive], train[~positive], tau, "squared_hinge", MARGIN)
    return {
        "objective": objective.item(),
        "test_partial_auc": partial_auc(scores["test"], labels["test"], MAX_FPR).item(),
        "test_auc": partial_auc(scores["test"], labels["test"], 1.0).item(),
    }


def run(folder: Path, tau: float, method: str, seed: int, epochs: int, momentum: float) -> list[dict[str, Any]]:
    """Second stage: train a classifier on the features once; the figures at the end."""
    silent_process(seed)
    row = {"seed": seed, "tau": tau, "method": method, "epochs": epochs}
    if method == PRETRAINING:
        scores = {split: torch.from_numpy(np.load(folder / split / "scores.npy")) for split in ("train", "test")}
        return [{**row, "lr": 0.0, "arguments": "{}", **figures(folder, tau, scores)}]
    lr, arguments = SETTINGS[tau].get(method, (None, {}))
    if lr is not None:
        lr *= 1 - momentum
    data = ImbalancedImageDataModule(str(folder), dataset="features")
    data.setup("fit")
    task = PartialAUCTask(
        data.num_anchors,
        dual_update(method, arguments),
        data.num_features,
        tau=tau,
        margin=MARGIN,
        lr=lr,
        weight_step="proximal" if lr is None else "gradient",
        momentum=momentum,
    )
    trainer = bare_trainer(
        accelerator="cpu",
        max_epochs=epochs,
        limit_val_batches=0,
    )
    row |= {"lr": "auto" if task.finds_lr else task.lr, "arguments": json.dumps(arguments)}
    try:
        trainer.fit(task, datamodule=data)
    except DualDivergenceError:
        return [{**row, **dict.fromkeys(("objective", "test_partial_auc", "test_auc"), float("nan"))}]
    scores = {}
    for split in ("train", "test"):
        with torch.no_grad():
            scores[split] = task.scores(task(torch.from_numpy(np.load(folder / split / "features.npy"))))
    return [{**row, **figures(folder, tau, scores)}]


def table(rows: list[dict[str, Any]]) -> str:
    """Mean and deviation over the seeds, as a Markdown table."""
    lines = ["| τ | method | training objective | test partial AUC | settings |", "| --- | --- | --- | --- | --- |"]
    for tau in TAUS:
        for method in dict.fromkeys(row["method"] for row in rows):
            mine = [row for row in rows if row["method"] == method and row["tau"] == tau]
            said = "first stage"
            if method != PRETRAINING:
                lr = None if method == DEFAULT else mine[0]["lr"]
                said = settings(lr, json.loads(mine[0]["arguments"]))
            objective, area = (
                "{:.4f} ± {:.4f}".format(*spread([row[key] for row in mine]))
                for key in ("objective", "test_partial_auc")
            )
            lines.append(f"| {tau} | {method} | {objective} | {area} | {said} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="CIFAR-10 as an image folder: train/<class>/, test/<class>/")
    parser.add_argument("--positive-classes", nargs="+", default=POSITIVE, help="folders (CIFAR-10's last five)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of both stages (0 1 2)")
    parser.add_argument("--width", type=int, default=16, help="width of the ResNet-18; 64 is the usual one (16)")
    parser.add_argument("--pretrain-epochs", type=int, default=15, help="epochs of the first stage (15)")
    parser.add_argument("--epochs", type=int, default=60, help="epochs of the second stage (60)")
    parser.add_argument("--momentum", type=float, default=0.0, help="momentum of SGD in the second stage (0)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/compare_pauc"), help="folder of what is kept")
    arguments = parser.parse_args()
    out: Path = arguments.out / f"width_{arguments.width}_epochs_{arguments.pretrain_epochs}"
    folders = {seed: out / f"seed_{seed}" for seed in arguments.seeds}
    first = [
        (arguments.path, arguments.positive_classes, seed, arguments.width, arguments.pretrain_epochs, folder)
        for seed, folder in folders.items()
        if not (folder / "test" / "scores.npy").exists()
    ]
    run_missing(pretrain, first, out / "pretrained.csv", arguments.workers)
    file = out / (f"runs_momentum_{arguments.momentum:g}.csv" if arguments.momentum else "runs.csv")
    done = {(row["seed"], row["tau"], row["method"], row["epochs"]) for row in read_rows(file)}
    todo = [
        (folder, tau, method, seed, arguments.epochs, arguments.momentum)
        for tau in TAUS
        for seed, folder in folders.items()
        for method in (PRETRAINING, *SETTINGS[tau], DEFAULT)
        if (seed, tau, method, arguments.epochs) not in done
    ]
    run_missing(run, todo, file, arguments.workers)
    rows = [row for row in read_rows(file) if row["seed"] in arguments.seeds and row["epochs"] == arguments.epochs]
    order = [PRETRAINING, *SETTINGS[TAUS[0]], DEFAULT]
    print(table(sorted(rows, key=lambda row: order.index(row["method"]))))


if __name__ == "__main__":
    main()

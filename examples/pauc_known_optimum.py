"""The six dual updates, SCENT also with nothing set, on a partial AUC problem whose optimum is known.

A linear head on fixed features, raw scores and the squared hinge make the objective convex. Its minimum F* over all
positives × negatives is found by L-BFGS in float64; then every method trains for the same epochs with its own SETTINGS
and the rest, (F − F*) / (F_start − F*), is printed in per cent: with 32 positives and 32 negatives a batch, and with
32 and 4, where the bias of a mini-batch is what separates the methods. SCENT also has a row with log α found, and one
where the learning rate is the task's own, with its proximal step. All have momentum 0.9; --momentum 0 has ten times
the rates.

The rows are 2,000 positive and 10,000 negative training images of an image folder (train/<class>/…, the second half of
the classes is positive) under a random convolution, whitened: --path, or cifar10 in the folder that the environment
variable SCENT_LIGHTNING_DATA names; without either scikit-learn's digits.

    python examples/pauc_known_optimum.py --path data/cifar10 --workers 2

A figure shows the rest against epochs. The last line is JSON: for each τ the gap of each method, as a fraction, with
32 negatives a batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from resumable import bare_trainer, dual_update, of_seeds, read_rows, run_missing, silent_process
from scipy.optimize import minimize
from sklearn.decomposition import PCA

from scent_lightning.data import ImbalancedImageDataModule
from scent_lightning.errors import DualDivergenceError
from scent_lightning.figures import look_of, mean_and_range, new_figure, note, save, style
from scent_lightning.metrics.partial_auc import partial_auc_objective
from scent_lightning.tasks import PartialAUCTask

Array = npt.NDArray[np.float64]
MARGIN, POSITIVES, NEGATIVES, COMPONENTS, DIGIT_COMPONENTS = 0.5, 2000, 10_000, 128, 20
TAUS, POSITIVES_PER_BATCH, NEGATIVES_PER_BATCH = (0.05, 0.1), 32, (32, 4)
MOMENTUM, DEFAULT = 0.9, "SCENT default"
CURVE = (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50)  # epochs after which the objective is looked at, besides the last

Settings = dict[str, tuple[float, dict[str, Any]]]
# Learning rate and arguments of the dual update for each number of negatives a batch and each τ, the best of what was
# tried on the images: learning rates 1.25e-5 to 4e-4, α 0.1 to 1, γ 0.03 to 0.3, log α from −ν* + 2 to −ν* − 3 with
# ν* = F*/τ; ρ is the published one. With four negatives δ 1 lets U-max reset ν to a few negatives' ℓ too often.
COSINE = {"schedule": "cosine"}


def _asgd_like(lr: float, alpha: float, delta: float) -> Settings:
    return {
        "ASGD": (lr, {"alpha": alpha, **COSINE}),
        "SoftplusASGD": (lr, {"alpha": alpha, "rho": 1e-3, **COSINE}),
        "UMax": (lr, {"alpha": alpha, "delta": delta, **COSINE}),
    }


def _scent(lr: float, log_alpha: float) -> Settings:
    return {
        "SCENT": (lr, {"log_alpha": log_alpha, "max_log_weight": 2.0, **COSINE}),
        "SCENT auto": (lr, {"log_alpha": "auto"}),
    }


SETTINGS: dict[tuple[int, float], Settings] = {
    (32, 0.05): {
        "BSGD": (1e-4, {}),
        **_asgd_like(1.8e-5, 0.3, 1.0),
        "SOX": (2.5e-5, {"gamma": 0.1}),
        **_scent(1.8e-5, -5.5),
    },
    (32, 0.1): {
        "BSGD": (2e-4, {}),
        **_asgd_like(1.8e-5, 0.3, 1.0),
        "SOX": (2.5e-5, {"gamma": 0.1}),
        **_scent(1.8e-5, -3.3),
    },
    (4, 0.05): {
        "BSGD": (5e-5, {}),
        **_asgd_like(1.25e-5, 0.15, 3.0),
        "SOX": (2.5e-5, {"gamma": 0.06}),
        **_scent(1.25e-5, -6.4),
    },
    (4, 0.1): {
        "BSGD": (1e-4, {}),
        **_asgd_like(1.25e-5, 0.15, 3.0),
        "SOX": (2.5e-5, {"gamma": 0.06}),
        **_scent(1.25e-5, -4.1),
    },
}


def image_features(folder: Path) -> tuple[Array, Array]:
    """Random convolutional features of the first rows of each class group, and their labels."""
    positive: list[str | int] = ["dog", "frog", "horse", "ship", "truck"]
    data = ImbalancedImageDataModule(str(folder), positive_classes=positive, augment=False, in_memory=False)
    data.setup("fit")
    labels = data.train_labels
    kept = torch.cat([(labels == 1).nonzero().squeeze(1), (labels == 0).nonzero().squeeze(1)])
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for value, count in ((1, POSITIVES), (0, NEGATIVES)):
        mine = kept[labels[kept] == value]
        chosen.append(mine[torch.randperm(len(mine), generator=generator)[:count]])
    filters = torch.randn(64, 3, 6, 6, generator=generator) / 108**0.5
    features = []
    dataset: Any = data.train_eval_dataloader().dataset
    for rows in torch.split(torch.cat(chosen), 500):
        images, _, _ = dataset.__getitems__(rows.tolist())
        maps = torch.nn.functional.conv2d(images, filters).relu()
        features.append(torch.nn.functional.adaptive_avg_pool2d(maps, 2).flatten(1))
    return torch.cat(features).double().numpy(), labels[torch.cat(chosen)].double().numpy()


def digit_features() -> tuple[Array, Array]:
    """scikit-learn's digits, 5 to 9 positive, a fifth of them kept."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    positive = digits.target >= 5
    kept = ~positive | (np.random.default_rng(0).random(len(positive)) < 0.2)
    return digits.data[kept], positive[kept].astype(np.float64)


def data_folder() -> Path:
    """Where data sets are looked for."""
    given = os.environ.get("SCENT_LIGHTNING_DATA")
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(given) if given else beside if beside.is_dir() else Path("data")


def find_images(path: str | None, out: Path) -> Path | None:
    """The image folder: as given, unpacked from an archive, or in SCENT_LIGHTNING_DATA; None if there is none."""
    found = Path(path) if path else data_folder() / "cifar10"
    archives = [found] if found.is_file() else sorted(found.glob("*.tar.gz"))
    if (found / "train").is_dir():
        return found
    if archives:
        with tarfile.open(archives[0]) as archive:
            # Python 3.10 and 3.11 know the argument from a later patch on; newer ones warn without it.
            safe: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(out / "images", **safe)
        return out / "images"
    if path:
        raise SystemExit(f"{found} has neither a folder train nor an archive .tar.gz with one")
    return None


def write_features(path: Path | None, out: Path) -> None:
    """The features, whitened to their first principal components, in the layout that the data module reads."""
    features, labels = image_features(path) if path else digit_features()
    features = PCA(COMPONENTS if path else DIGIT_COMPONENTS, whiten=True, random_state=0).fit_transform(features)
    for split in ("train", "test"):
        (out / split).mkdir(parents=True)
        np.save(out / split / "features.npy", features.astype(np.float32))
        np.save(out / split / "labels.npy", labels.astype(np.int64))


def read_features(out: Path) -> tuple[Array, Array]:
    """Features of the positives and of the negatives, exactly those that are trained on."""
    features = np.load(out / "train" / "features.npy").astype(np.float64)
    labels = np.load(out / "train" / "labels.npy")
    return features[labels == 1], features[labels == 0]


def objective(weight: Array, positives: Array, negatives: Array, tau: float) -> float:
    """F, over all pairs, in float64."""
    scores = [torch.from_numpy(rows @ weight) for rows in (positives, negatives)]
    return float(partial_auc_objective(scores[0], scores[1], tau, "squared_hinge", MARGIN))


def objective_and_gradient(weight: Array, positives: Array, negatives: Array, tau: float) -> tuple[float, Array]:
    """F and its gradient, a block of positives at a time."""
    high, low = torch.from_numpy(positives @ weight), torch.from_numpy(negatives @ weight)
    by_high, by_low, total = torch.zeros_like(high), torch.zeros_like(low), 0.0
    for start in range(0, len(high), 100):
        hinge = low.unsqueeze(0).sub(high[start : start + 100].unsqueeze(1)).add_(MARGIN).relu_()
        scores = hinge.square().div_(tau)
        largest = scores.amax(dim=1, keepdim=True)
        exponentials = scores.sub_(largest).exp_()
        sums = exponentials.sum(dim=1, keepdim=True)
        total += float((largest + (sums / len(low)).log()).sum())
        weights = exponentials.div_(sums).mul_(hinge)  # τ · softmax · ∂(hinge²)/∂d / τ, up to the factor 2
        by_low += weights.sum(dim=0)
        by_high[start : start + 100] = -weights.sum(dim=1)
    gradient = by_high.numpy() @ positives + by_low.numpy() @ negatives
    return tau * total / len(high), 2 * gradient / len(high)


def solve(positives: Array, negatives: Array, tau: float) -> tuple[float, Array]:
    """F* and where it is."""
    options = {"maxiter": 2000, "maxfun": 2000, "ftol": 1e-13, "gtol": 1e-7, "maxcor": 30}
    start = np.zeros(positives.shape[1])
    found = minimize(
        objective_and_gradient, start, (positives, negatives, tau), method="L-BFGS-B", jac=True, options=options
    )
    print(
        f"τ {tau}: F* = {found.fun:.7f} after {found.nfev} evaluations, largest entry of the gradient "
        f"{np.abs(found.jac).max():.1e}; F at the start {objective(start, positives, negatives, tau):.4f}"
    )
    return float(found.fun), found.x


class Curve(L.Callback):
    """The objective after some epochs.

    Args:
        pair: positives and negatives.
        tau: temperature.
        epochs: after which.
    """

    def __init__(self, pair: tuple[Array, Array], tau: float, epochs: set[int]) -> None:
        self.pair, self.tau, self.epochs = pair, tau, epochs
        self.found: dict[int, float] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if (epoch := trainer.current_epoch + 1) in self.epochs:
            network: Any = pl_module.network
            self.found[epoch] = objective(network.weight.detach().double().numpy()[0], *self.pair, self.tau)


def as_far(lr: float, rows: int, momentum: float) -> float:
    """A learning rate of SETTINGS for other rows and another momentum.

    Fewer rows make fewer steps, which have to be larger to go as far; and momentum makes each 1/(1 − momentum) times as
    large in the end.
    """
    return lr * (POSITIVES + NEGATIVES) / rows * (1 - momentum) / (1 - MOMENTUM)


def run(
    folder: str, tau: float, negatives_per_batch: int, method: str, seed: int, epochs: int, momentum: float
) -> list[dict[str, Any]]:
    """Train once; the objective after the epochs of the curve."""
    silent_process(seed)
    lr, arguments = SETTINGS[negatives_per_batch, tau].get(method, (None, {}))
    pair = read_features(Path(folder))
    data = ImbalancedImageDataModule(
        folder,
        dataset="features",
        batch_size=POSITIVES_PER_BATCH + negatives_per_batch,
        positives_per_batch=POSITIVES_PER_BATCH,
        batches_per_epoch=sum(map(len, pair)) // (2 * POSITIVES_PER_BATCH),
    )
    data.setup("fit")
    if lr is not None:
        lr = as_far(lr, data.num_anchors, momentum)
    task = PartialAUCTask(
        data.num_anchors,
        dual_update(method, arguments),
        data.num_features,
        tau=tau,
        margin=MARGIN,
        score="raw",
        lr=lr,
        weight_step="proximal" if lr is None else "gradient",
        momentum=momentum,
    )
    linear: Any = task.network
    torch.nn.init.zeros_(linear.weight)
    curve = Curve(pair, tau, {epoch for epoch in CURVE if epoch < epochs} | {epochs})
    trainer = bare_trainer(accelerator="cpu", max_epochs=epochs, limit_val_batches=0, callbacks=[curve])
    try:
        trainer.fit(task, datamodule=data)
    except DualDivergenceError:
        curve.found[epochs] = float("nan")
    setting = {"lr": "auto" if task.finds_lr else task.lr, "arguments": json.dumps(arguments)}
    which = {"tau": tau, "negatives": negatives_per_batch, "method": method, "seed": seed, "epochs": epochs}
    return [
        {**which, "momentum": momentum, **setting, "epoch": epoch, "objective": value}
        for epoch, value in curve.found.items()
    ]


def methods_of(negatives_per_batch: int, tau: float) -> list[str]:
    """The rows of a table."""
    return [*SETTINGS[negatives_per_batch, tau], DEFAULT]


Gaps = dict[tuple[int, float, str], dict[int, list[float]]]


def gaps_of(rows: list[dict[str, Any]], optima: dict[float, float]) -> Gaps:
    """By negatives of a batch, τ and method: the rest of the gap after each epoch of the curve, of all seeds."""
    gaps: Gaps = {}
    for row in rows:
        best = optima[row["tau"]]
        of_epoch = gaps.setdefault((row["negatives"], row["tau"], row["method"]), {})
        of_epoch.setdefault(row["epoch"], []).append((row["objective"] - best) / (MARGIN**2 - best))
    return gaps


@style()
def figure(gaps: Gaps, said: str, path: Path) -> None:
    """The rest of the gap against epochs."""
    drawing, panels = new_figure(len(NEGATIVES_PER_BATCH), len(TAUS), size=(4.4, 3.0))
    for row, count in zip(panels, NEGATIVES_PER_BATCH, strict=True):
        for panel, tau in zip(row, TAUS, strict=True):
            methods = methods_of(count, tau)
            for method in methods:
                by_epoch = sorted(gaps[count, tau, method].items())
                values = [[100 * gap for gap in values] for _, values in by_epoch]
                mean_and_range(panel, [epoch for epoch, _ in by_epoch], values, method, **look_of(method, methods))
            panel.set(xscale="log", yscale="log", title=f"{count} negatives a batch, τ = {tau}")
        row[0].set_ylabel("rest of the gap to the optimum (%)")
    for panel in panels[-1]:
        panel.set_xlabel("epoch")
    drawing.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center")
    note(drawing, said)
    save(drawing, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", help="image folder with train/<class>/, or a .tar.gz of one")
    parser.add_argument("--epochs", type=int, default=60, help="epochs of a run (60)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds (0)")
    parser.add_argument("--momentum", type=float, default=MOMENTUM, help=f"momentum of SGD ({MOMENTUM})")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, help="folder for features and results; runs in it are not run again")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="pauc_known_optimum_"))
    folder = out / "features"
    if not folder.exists():
        write_features(find_images(arguments.path, out), folder)
    positives, negatives = read_features(folder)
    print(f"{len(positives):,} positives × {len(negatives):,} negatives, {positives.shape[1]} features")
    optima = {tau: solve(positives, negatives, tau)[0] for tau in TAUS}
    epochs, momentum = arguments.epochs, arguments.momentum
    keys = ("tau", "negatives", "method", "seed", "epochs", "momentum")
    done = {tuple(row[key] for key in keys) for row in read_rows(out / "runs.csv")}
    todo = [
        (str(folder), tau, count, method, seed, epochs, momentum)
        for seed in arguments.seeds
        for count, tau in SETTINGS
        for method in methods_of(count, tau)
        if (tau, count, method, seed, epochs, momentum) not in done
    ]
    run_missing(run, todo, out / "runs.csv", arguments.workers)
    rows = [
        row
        for row in read_rows(out / "runs.csv")
        if row["epochs"] == epochs and row["momentum"] == momentum and row["seed"] in arguments.seeds
    ]
    gaps = gaps_of(rows, optima)
    last: dict[int, dict[str, dict[str, float]]] = {count: {} for count in NEGATIVES_PER_BATCH}
    for count in NEGATIVES_PER_BATCH:
        print(f"\n{POSITIVES_PER_BATCH} positives and {count} negatives a batch, {epochs} epochs: gap in %")
        methods = methods_of(count, TAUS[0])
        print("| τ | " + " | ".join(methods) + " |\n| --- |" + " --- |" * len(methods))
        for tau in TAUS:
            means = {method: statistics.mean(gaps[count, tau, method][epochs]) for method in methods}
            print(f"| {tau} | " + " | ".join(f"{100 * mean:.5f}" for mean in means.values()) + " |")
            last[count][str(tau)] = {method: round(mean, 8) for method, mean in means.items()}
    picture = out / f"curves_momentum_{momentum:g}.png"
    figure(gaps, f"momentum {momentum:g}; {of_seeds(arguments.seeds)}", picture)
    print(f"runs: {out / 'runs.csv'}\nfigure: {picture}")
    print(json.dumps(last[NEGATIVES_PER_BATCH[0]]))


if __name__ == "__main__":
    main()

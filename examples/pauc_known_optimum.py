"""The six dual updates, SCENT also with nothing set, on a partial AUC problem whose optimum is known.

A linear head on fixed features, raw scores and the squared hinge make the objective convex. Its minimum F* over all
positives × negatives is found by L-BFGS in float64; then every method trains for the same epochs with its own SETTINGS
and the rest, (F − F*) / (F_start − F*), is printed in per cent: with 32 positives and 32 negatives a batch, and with 32
and 4, where the bias of a mini-batch is what separates the methods.

The rows are 2,000 positive and 10,000 negative training images of an image folder (train/<class>/…, the second half of
the classes is positive) under a random convolution, whitened: --path, or cifar10 in the folder that the environment
variable SCENT_LIGHTNING_DATA names; without either scikit-learn's digits.

    python examples/pauc_known_optimum.py --path data/cifar10 --workers 2

The last line is JSON: for each τ the gap of each method, as a fraction, with 32 negatives a batch.
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

import numpy as np
import numpy.typing as npt
import torch
from resumable import bare_trainer, dual_update, read_rows, run_missing, silent_process
from scipy.optimize import minimize
from sklearn.decomposition import PCA

from scent_lightning.data import ImbalancedImageDataModule
from scent_lightning.errors import DualDivergenceError
from scent_lightning.metrics.partial_auc import partial_auc_objective
from scent_lightning.tasks import PartialAUCTask

Array = npt.NDArray[np.float64]
MARGIN, POSITIVES, NEGATIVES, COMPONENTS, DIGIT_COMPONENTS = 0.5, 2000, 10_000, 128, 20
TAUS, POSITIVES_PER_BATCH, NEGATIVES_PER_BATCH = (0.05, 0.1), 32, (32, 4)

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


def run(
    folder: str,
    tau: float,
    negatives_per_batch: int,
    method: str,
    seed: int,
    epochs: int,
    lr: float | None = None,
    arguments: dict[str, Any] | None = None,
    momentum: float = 0.9,
) -> list[dict[str, Any]]:
    """Train once; the objective at the end."""
    silent_process(seed)
    tuned_lr, tuned = SETTINGS.get((negatives_per_batch, tau), {}).get(method, (0.0, {}))
    arguments = tuned if arguments is None else arguments
    positives, negatives = read_features(Path(folder))
    data = ImbalancedImageDataModule(
        folder,
        dataset="features",
        batch_size=POSITIVES_PER_BATCH + negatives_per_batch,
        positives_per_batch=POSITIVES_PER_BATCH,
        batches_per_epoch=(len(positives) + len(negatives)) // (2 * POSITIVES_PER_BATCH),
    )
    data.setup("fit")
    # Fewer rows make fewer steps, which have to be larger to go as far.
    rate = (lr or tuned_lr) * (POSITIVES + NEGATIVES) / data.num_anchors
    task = PartialAUCTask(
        data.num_anchors,
        dual_update(method, arguments),
        data.num_features,
        tau=tau,
        margin=MARGIN,
        score="raw",
        lr=rate,
        weight_step="gradient",
        momentum=momentum,
    )
    linear: Any = task.network
    torch.nn.init.zeros_(linear.weight)
    trainer = bare_trainer(
        accelerator="cpu",
        max_epochs=epochs,
        limit_val_batches=0,
    )
    try:
        trainer.fit(task, datamodule=data)
        reached = objective(linear.weight.detach().double().numpy()[0], positives, negatives, tau)
    except DualDivergenceError:
        reached = float("nan")
    return [
        {
            "tau": tau,
            "negatives": negatives_per_batch,
            "method": method,
            "seed": seed,
            "epochs": epochs,
            "lr": rate,
            "arguments": json.dumps(arguments),
            "objective": reached,
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", help="image folder with train/<class>/, or a .tar.gz of one")
    parser.add_argument("--epochs", type=int, default=60, help="epochs of a run (60)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds (0)")
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
    done = {(r["tau"], r["negatives"], r["method"], r["seed"], r["epochs"]) for r in read_rows(out / "runs.csv")}
    todo = [
        (str(folder), tau, count, method, seed, arguments.epochs)
        for count, tau in SETTINGS
        for method in SETTINGS[count, tau]
        for seed in arguments.seeds
        if (tau, count, method, seed, arguments.epochs) not in done
    ]
    run_missing(run, todo, out / "runs.csv", arguments.workers)
    start = MARGIN**2
    gaps: dict[int, dict[str, dict[str, float]]] = {}
    for row in read_rows(out / "runs.csv"):
        if row["epochs"] == arguments.epochs and row["seed"] in arguments.seeds:
            gap = (row["objective"] - optima[row["tau"]]) / (start - optima[row["tau"]])
            of_tau = gaps.setdefault(row["negatives"], {}).setdefault(str(row["tau"]), {})
            of_tau.setdefault(row["method"], []).append(gap)  # type: ignore[arg-type,attr-defined]
    for count, by_tau in gaps.items():
        print(f"\n{POSITIVES_PER_BATCH} positives and {count} negatives a batch, {arguments.epochs} epochs: gap in %")
        methods = list(SETTINGS[count, TAUS[0]])
        print("| τ | " + " | ".join(methods) + " |\n| --- |" + " --- |" * len(methods))
        for tau, by_method in by_tau.items():
            means = {method: statistics.mean(values) for method, values in by_method.items()}  # type: ignore[arg-type]
            print(f"| {tau} | " + " | ".join(f"{100 * means[method]:.5f}" for method in methods) + " |")
            by_tau[tau] = {method: round(mean, 8) for method, mean in means.items()}
    print(json.dumps(gaps[NEGATIVES_PER_BATCH[0]]))


if __name__ == "__main__":
    main()

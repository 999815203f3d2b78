"""A small run of each task on data of its own kind, for tests of what holds for all of them."""

import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_diabetes
from torch import nn

from scent_lightning.data import (
    FeatureDataModule,
    ImageTextDataModule,
    ImbalancedImageDataModule,
    InteractionsDataModule,
    RankingDataModule,
    TabularRegressionDataModule,
)
from scent_lightning.duals import SCENT, SOX
from scent_lightning.tasks import (
    CLIPTask,
    DRORegressionTask,
    ExtremeClassificationTask,
    MultiLabelTask,
    PartialAUCTask,
    RankingTask,
    RetrievalTask,
)

TOWER = {"layers": 1, "width": 16}
ARCHITECTURE = {
    "embed_dim": 8,
    "vision_cfg": {**TOWER, "image_size": 16, "patch_size": 8, "head_width": 8},
    "text_cfg": {**TOWER, "context_length": 16, "vocab_size": 128, "heads": 2},
}


def letters(captions):
    """A tokeniser of 16 letters a caption."""
    return torch.tensor([[ord(letter) for letter in caption[-16:].rjust(16)] for caption in captions])


def once(folder, make):
    """Have ``make`` fill a folder, which is there as a whole or not at all, whichever of several processes is first."""
    if folder.exists():
        return
    part = Path(tempfile.mkdtemp(dir=folder.parent))
    make(part)
    with suppress(OSError):  # another was faster
        part.rename(folder)


def write(folder, features, labels):
    def make(part):
        np.save(part / "features.npy", features.astype(np.float32))
        np.save(part / "labels.npy", labels)

    once(folder, make)


def regression(folder, batch_size):
    table = np.column_stack(load_diabetes(return_X_y=True))[:101] / ([1] * 10 + [100])

    def make(part):
        np.savetxt(part / "table.csv", table, delimiter=",", header=",".join("abcdefghijy"), comments="")

    once(folder / "table", make)
    data = TabularRegressionDataModule(str(folder / "table" / "table.csv"), target="y", batch_size=batch_size)
    data.setup("fit")
    return DRORegressionTask(data.num_features, SCENT(-2.0, schedule="cosine"), tau=2.0, lr=1e-2), data


def classification(folder, batch_size, negatives="in_batch", dropout=0.0):
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 12, 101)
    features = generator.standard_normal((12, 6))[labels] + 0.5 * generator.standard_normal((101, 6))
    write(folder / "train", features, labels)
    data = FeatureDataModule(str(folder), batch_size=batch_size)
    data.setup("fit")
    backbone = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    if dropout:
        backbone.append(nn.Dropout(dropout))
    task = ExtremeClassificationTask(
        6,
        12,
        data.num_anchors,
        SCENT(2.0, max_log_weight=2.0),
        negatives=negatives,
        num_negatives=5,
        backbone=backbone,
        lr=0.1,
        momentum=0.5,
    )
    return task, data


def several_labels(folder, batch_size, negatives="in_batch", **more):
    generator = np.random.default_rng(0)
    answers = np.array([generator.permutation(12)[:3] for _ in range(101)])
    features = generator.standard_normal((12, 6))[answers].mean(axis=1)
    answers[generator.random((101, 3)) < 0.3] = -1
    write(folder / "train", features, answers)
    data = FeatureDataModule(str(folder), batch_size=batch_size)
    data.setup("fit")
    arguments = {"negatives": negatives, "num_negatives": 5, "lr": 0.1, "momentum": 0.5, **more}
    return MultiLabelTask(6, 12, data.num_anchors, SCENT(2.0), backbone=nn.Linear(6, 6), **arguments), data


def ranking(folder, batch_size):
    generator = np.random.default_rng(0)
    labels = (np.arange(101) < 40).astype(np.int64)
    features = generator.standard_normal((101, 6)) + labels[:, None]
    write(folder / "train", features, labels)
    data = ImbalancedImageDataModule(
        str(folder),
        dataset="features",
        batch_size=batch_size,
        positives_per_batch=batch_size // 2,
    )
    data.setup("fit")
    return PartialAUCTask(data.num_anchors, SOX(0.5), data.num_features, tau=0.2, lr=0.05, momentum=0.9), data


def lists(folder, batch_size):
    """Lists of documents, some of them longer than there is room for."""

    def make(part):
        generator = np.random.default_rng(0)
        rows = [(query, *generator.standard_normal(6)) for query in range(101) for _ in range(generator.integers(2, 9))]
        worth = [row[1] + row[2] + 0.5 * generator.standard_normal() for row in rows]
        grades = np.digitize(worth, [0.0, 1.0, 2.0])
        grades[[number for number, row in enumerate(rows) if number == 0 or row[0] != rows[number - 1][0]]] += 1
        lines = [
            f"{grade} qid:{query} " + " ".join(f"{number}:{value:.4f}" for number, value in enumerate(values, start=1))
            for grade, (query, *values) in zip(grades, rows, strict=True)
        ]
        (part / "train.txt").write_text("\n".join(lines))

    once(folder / "lists", make)
    data = RankingDataModule(str(folder / "lists"), batch_size=batch_size, list_size=4)
    data.setup("fit")
    network = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    return RankingTask(6, data.num_anchors, SCENT(2.0), network=network, lr=0.05), data


def images(folder, batch_size):
    """Augmented in a loader process, and a network whose batch norm has statistics of its own."""

    def make(part):
        generator = np.random.default_rng(0)
        for name, count in (("dark", 61), ("light", 40)):
            (part / name).mkdir()
            for number in range(count):
                pixels = generator.integers(0, 156, (12, 12, 3)) + 100 * (name == "light")
                Image.fromarray(pixels.astype(np.uint8)).save(part / name / f"{number:03}.png")

    once(folder / "train", make)
    data = ImbalancedImageDataModule(
        str(folder),
        dataset="folder",
        positive_classes=["light"],
        batch_size=batch_size,
        num_workers=1,
    )
    data.setup("fit")
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(400, 1))
    return PartialAUCTask(data.num_anchors, SCENT(3.0), network=network, tau=0.2, lr=0.05, momentum=0.9), data


def contrastive(folder, batch_size, drop_last=False):
    data = ImageTextDataModule(
        source="shapes",
        image_size=16,
        tokenizer=letters,
        batch_size=batch_size,
        rows=101,
        val_rows=0,
        drop_last=drop_last,
    )
    data.setup("fit")
    task = CLIPTask(
        data.num_anchors, SCENT(6.0, max_log_weight=2.0), architecture=ARCHITECTURE, lr=1e-3, tau_lr=1e-4, rho=4.0
    )
    return task, data


def recommendation(folder, batch_size, **arguments):
    """Items of which some are in most batches, of 23 users who have some of them in common."""

    def make(part):
        generator = np.random.default_rng(0)
        pairs = {
            (int(u), int(i)) for u, i in zip(generator.integers(0, 23, 300), generator.zipf(1.3, 300) % 37, strict=True)
        }
        rows = [f"u{user},i{item}" for user, item in sorted(pairs)[:101]]
        (part / "pairs.csv").write_text("\n".join(["user,item", *rows]))

    once(folder / "pairs", make)
    data = InteractionsDataModule(
        str(folder / "pairs" / "pairs.csv"), query="user", item="item", leave_out="none", batch_size=batch_size
    )
    data.setup("fit")
    sizes = data.num_queries, data.num_items, data.num_anchors
    return RetrievalTask(*sizes, SCENT(2.0, max_log_weight=2.0), **{"dim": 8, "lr": 0.02, **arguments}), data


SETTINGS = {
    "regression": regression,
    "classification": classification,
    "ranking": ranking,
    "contrastive": contrastive,
    "recommendation": recommendation,
}


def _moved_by(folder, batch_size, update, setting, **arguments):
    task, data = setting(folder, batch_size, **arguments)
    for variable in task.duals.values():
        variable.use(update)
    return task, data


def moved_by(update, setting):
    """A setting whose ν is moved by another update."""
    return partial(_moved_by, update=update, setting=setting)

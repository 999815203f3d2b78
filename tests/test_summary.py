"""The summary at the start of every fit: what each data module says, on the screen, in the log, once."""

import logging
from functools import partial

import numpy as np
import pandas as pd
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scent_lightning.data import (
    FeatureDataModule,
    ImageTextDataModule,
    ImbalancedImageDataModule,
    SyntheticFeatureDataModule,
    TabularRegressionDataModule,
)
from scent_lightning.summary import announce
from tests.helpers import SoftmaxData, SoftmaxTask, quiet_trainer
from tests.settings import SETTINGS, images, letters

EXPECTED = {
    "regression": [
        "Data of TabularRegressionDataModule:",
        "features: 10, standardized: a, b, c, d, e, f, g, h, i, j",
        "target: y",
        "training: 101 rows",
        "validation: the training rows, as val_fraction is 0",
        "test: the training rows, as test_fraction is 0",
        "anchors: 1 (nu)",
    ],
    "classification": [
        "Data of FeatureDataModule:",
        "features: 6, float32",
        "classes: 12",
        "training: 101 rows",
        "validation: none, as there is no folder 'val'",
        "anchors: 101 (nu)",
        "own class: comes into the loss by and by, so train/loss rises; train/cross_entropy does not",
    ],
    "ranking": [
        "Data of ImbalancedImageDataModule:",
        "features: 6",
        "positive classes: 1",
        "negative classes: 0",
        "training: 101 rows: 40 positive, 61 negative",
        "validation: none, as there is neither a folder 'val' nor 'test'",
        "anchors: 101 (nu)",
    ],
    "images": ["positive classes: light", "negative classes: dark", "training: 101 rows: 40 positive, 61 negative"],
    "contrastive": [
        "Data of ImageTextDataModule:",
        "data: shapes",
        "training: 101 rows",
        "validation: none",
        "anchors: 101 (",
    ],
}


def said(caplog):
    """The summaries that were logged."""
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("Data")]


def in_tensorboard(logger):
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return [event.tensor_proto.string_val[0].decode() for event in events.Tensors("data/text_summary")]


@pytest.mark.parametrize("setting", EXPECTED)
def test_every_fit_says_once_what_it_has_read(setting, tmp_path, caplog):
    (tmp_path / "data").mkdir()
    task, data = {**SETTINGS, "images": images}[setting](tmp_path / "data", 16)
    logger = TensorBoardLogger(tmp_path / "log")
    with caplog.at_level(logging.INFO):
        quiet_trainer(logger=logger, max_steps=1, limit_val_batches=0).fit(task, datamodule=data)
    (summary,) = said(caplog)
    (text,) = in_tensorboard(logger)
    for line in EXPECTED[setting]:
        assert line in summary
        name, _, words = line.partition(": ")
        cell = words.replace("_", r"\_")
        assert not words or f"| {name} | {cell}" in text
    assert "\n\n" not in summary


class OwnWords(SoftmaxData):
    def data_summary(self):
        return {"training": "24 rows|of *mine*", "passed over": "2 of them"}


def test_a_data_module_of_ones_own(tmp_path, caplog):
    """Without a summary the anchors are known; with one it is said; for loaders alone, and without dual variables."""
    logger = TensorBoardLogger(tmp_path)
    loaders = {"train_dataloaders": SoftmaxData().train_dataloader()}
    with caplog.at_level(logging.INFO):
        quiet_trainer(max_steps=1).fit(SoftmaxTask(24), datamodule=SoftmaxData())
        quiet_trainer(max_steps=1, logger=logger).fit(SoftmaxTask(24), datamodule=OwnWords())
        quiet_trainer(max_steps=1, logger=CSVLogger(tmp_path)).fit(SoftmaxTask(30), **loaders)
    assert said(caplog) == [
        "Data of SoftmaxData:\n  anchors: 24 (nu)",
        "Data of OwnWords:\n  training: 24 rows|of *mine*\n  passed over: 2 of them\n  anchors: 24 (nu)",
        "Data:\n  anchors: 30 (nu)",
    ]
    assert r"| training | 24 rows\|of \*mine\* |" in in_tensorboard(logger)[0]


def test_only_a_fit_says_it(caplog):
    with caplog.at_level(logging.INFO):
        for run in ("validate", "test", "predict"):
            getattr(quiet_trainer(), run)(SoftmaxTask(24), datamodule=SoftmaxData())
    assert said(caplog) == []


def test_other_processes_say_nothing(monkeypatch, caplog):
    trainer = quiet_trainer()
    monkeypatch.setattr(type(trainer.strategy), "is_global_zero", False)
    with caplog.at_level(logging.INFO):
        announce(trainer, {"nu": 24})
    assert said(caplog) == []


# What each data module says


def features(folder, counts, labels=4):
    for split, count in counts.items():
        (folder / split).mkdir(parents=True)
        np.save(folder / split / "features.npy", np.zeros((count, 5), np.float16))
        np.save(folder / split / "labels.npy", np.arange(count) % labels)
    return str(folder)


def test_tables(tmp_path):
    frame = pd.DataFrame({"a": range(1000), "b": 1.0, "c": 2.0, "y": 0.5})
    frame.to_csv(tmp_path / "t.csv", index=False)
    make = partial(TabularRegressionDataModule, str(tmp_path / "t.csv"), target="y")
    assert make(features=["c", "a"], standardize=False, val_fraction=0.2, test_fraction=0.1).data_summary() == {
        "data": str(tmp_path / "t.csv"),
        "features": "2: c, a",
        "target": "y",
        "training": "700 rows",
        "validation": "200 rows",
        "test": "100 rows",
        "to look at": f"{tmp_path / 't.csv'}: column c, y has the same value in every row",
    }
    said = make(val_fraction=0.5).data_summary()
    assert (said["training"], said["validation"]) == ("500 rows", "500 rows")
    assert said["test"] == "the training rows, as test_fraction is 0"
    assert "target" not in TabularRegressionDataModule("diabetes").data_summary()


def test_feature_files(tmp_path):
    path = features(tmp_path, {"train": 1200, "val": 7, "dev": 5})
    said = FeatureDataModule(path).data_summary()
    assert (said["training"], said["validation"]) == ("1,200 rows", "7 rows of 'val'")
    said = FeatureDataModule(path, val_split="train", num_classes=9).data_summary()
    assert (said["classes"], said["validation"]) == ("9 (num_classes)", "1,200 rows of 'train', the training rows")
    said = SyntheticFeatureDataModule(rows=5, val_rows=1, batch_size=2).data_summary()
    assert (said["training"], said["validation"], said["classes"]) == ("5 rows", "1 row", "1,000, Zipf exponent 0.0")


def test_groups(tmp_path):
    path = features(tmp_path, {"train": 40, "test": 8})
    make = partial(ImbalancedImageDataModule, path, "features", batch_size=4, positive_classes=[2])
    assert make(negative_classes=[0, 1], removed_positives=0.5).data_summary() == {
        "data": f"features in {path}",
        "features": "5",
        "positive classes": "2",
        "negative classes": "0, 1",
        "left out classes": "3",
        "training": "25 rows: 5 positive, 20 negative",
        "removed": "5 rows of 10 positive training rows at random",
        "validation": "6 rows: 2 positive, 4 negative; of 'test', as there is no folder 'val'",
    }
    said = make(val_split="train").data_summary()
    assert said["validation"] == "40 rows: 10 positive, 30 negative; of 'train', the training rows"
    assert "removed" not in said
    many = features(tmp_path / "many", {"train": 300, "val": 150}, labels=150)
    said = ImbalancedImageDataModule(many, "features", batch_size=4, positive_classes=[0]).data_summary()
    assert said["negative classes"].endswith("19, 20, … (149 in all)")
    assert said["validation"] == "150 rows: 1 positive, 149 negative; of 'val'"


def test_pairs(tmp_path):
    for number in range(4):
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / f"{number}.png")
    frame = pd.DataFrame({"filepath": [f"{n}.png" for n in range(4)], "title": ["a", "", "b", "c"]})
    frame.assign(kind=["x", "y", "x", "x"], part=["t", "t", "t", "v"]).to_csv(tmp_path / "t.csv", index=False)
    data = ImageTextDataModule(
        path=str(tmp_path / "t.csv"),
        tokenizer=letters,
        class_column="kind",
        split_column="part",
        train_split="t",
        val_split="v",
        batch_size=2,
    )
    with pytest.warns(UserWarning, match="1 of 3 pairs have no caption and are skipped"):
        said = data.data_summary()
    assert said == {
        "data": f"table {tmp_path / 't.csv'}",
        "training": "3 rows, 1 of them skipped: part is 't'",
        "validation": "1 row",
        "classes": "2, of column 'kind': x, y",
    }

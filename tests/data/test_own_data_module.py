"""A data module of one's own is one new file: it trains, shuffles, resumes within an epoch and says what it read."""

import logging
from importlib import import_module
from itertools import chain

import numpy as np
import pytest
import torch

from scent_lightning import data
from scent_lightning.cli import main
from scent_lightning.data import IndexedDataModule, IndexedRows
from scent_lightning.errors import InputError
from tests.helpers import Steps, example_of_the_guide, quiet_trainer

MY_DATA = example_of_the_guide("my_data")


def write_rows(folder, seed=0):
    generator = np.random.default_rng(seed)
    for split, count in (("train", 61), ("val", 12)):
        x, y = generator.standard_normal((count, 4), dtype=np.float32), np.arange(count) % 3
        np.savez(folder / f"{split}.npz", x=x, y=y)


def fit(run, max_steps, workers=0, checkpoint=None):
    """Train by the command line, in four steps an epoch, keeping step 6; what the folder ``run`` has at the end."""
    main(
        [
            "fit",
            "--data=my_data.MyDataModule",
            "--data.path=.",
            f"--data.num_workers={workers}",
            "--model=ExtremeClassificationTask",
            "--model.top_k=1",
            "--dual=SCENT",
            "--trainer.accelerator=cpu",
            "--trainer.logger=false",
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_model_summary=false",
            f"--trainer.default_root_dir={run}",
            f"--trainer.max_steps={max_steps}",
            "--trainer.callbacks+=ModelCheckpoint",
            f"--trainer.callbacks.dirpath={run}",
            "--trainer.callbacks.filename=kept",
            "--trainer.callbacks.every_n_train_steps=6",
            f"--ckpt_path={checkpoint or 'null'}",
        ]
    )
    return torch.load(f"{run}/checkpoints/last.ckpt", weights_only=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_one_file_is_all_it_takes(tmp_path, monkeypatch, caplog, capsys, workers):
    """Resumed in the middle of an epoch, a run ends like the one that went on; with other rows it stops."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_data.py").write_text(MY_DATA)
    write_rows(tmp_path)
    with caplog.at_level(logging.INFO):
        whole = fit("whole", 10, workers)
    for line in ("Data of MyDataModule:", "training: 61 rows", "validation: 12 rows", "anchors: 61 (nu)"):
        assert line in caplog.text
    assert whole["state_dict"]["duals.nu.visited"].all()
    resumed = fit("resumed", 10, workers, "whole/kept.ckpt")
    before, after = (
        {name: value for name, value in end["state_dict"].items() if isinstance(value, torch.Tensor)}
        for end in (whole, resumed)
    )
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert resumed["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] == 2  # of the third epoch
    assert whole["MyDataModule"] == resumed["MyDataModule"]
    write_rows(tmp_path, seed=1)
    with pytest.raises(SystemExit):
        fit("more", 12, workers, "whole/kept.ckpt")
    assert "the training rows are others than the checkpoint's" in capsys.readouterr().err


class Lines(IndexedDataModule):
    """Rows that are computed when they are asked for; of the splits there are those that ``counts`` names."""

    def __init__(self, batch_size=4, first=0, **counts):
        super().__init__(batch_size, eval_batch_size=3)
        self.first = first
        self.counts = counts

    def load(self, split):
        count = self.counts.get(split)
        return None if count is None else LineRows(self.first, count)


class LineRows(IndexedRows):
    def __init__(self, first, count):
        self.first = first
        self.count = count

    def __len__(self):
        return self.count

    def fetch(self, index):
        numbers = torch.from_numpy(index) + self.first
        return numbers.float().unsqueeze(1), None


def test_what_follows_from_the_rows():
    """Shuffled training, evaluation in order, and the first split there is to predict."""
    lines = Lines(train=10, val=5, test=7)
    model = Steps()
    quiet_trainer(max_epochs=2, num_sanity_val_steps=0).fit(model, lines)
    quiet_trainer().test(model, lines, verbose=False)
    quiet_trainer().predict(model, lines)
    first, second = (list(chain(*epoch)) for epoch in (model.seen["train"][:3], model.seen["train"][3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert model.seen["val"] == 2 * list(range(5))
    assert model.seen["test"] == model.seen["predict"] == list(range(7))
    for counts, predicted in (({"train": 4, "val": 5}, 5), ({"train": 4}, 4), ({"train": 4, "predict": 1}, 1)):
        indices = [batch[-1] for batch in Lines(**counts).predict_dataloader()]
        assert torch.cat(indices).tolist() == list(range(predicted))
    assert Lines(train=4).val_dataloader() == []
    assert Lines(train=1000).data_summary() == {"training": "1,000 rows", "validation": "none"}


@pytest.mark.parametrize(
    ("after", "change"),
    [
        ({"train": 10}, "none"),
        ({"train": 12}, "appended"),
        ({"train": 9}, "replaced"),
        ({"train": 10, "first": 1}, "replaced"),
    ],
)
def test_rows_that_changed_are_known(after, change):
    lines = Lines(**after)
    lines.load_state_dict(Lines(train=10).state_dict())
    assert lines.changed_rows() == change


def test_a_split_is_loaded_once_until_a_checkpoint_says_how():
    lines = Lines(train=10)
    rows = lines.split("train")
    assert lines.split("train") is rows
    lines.load_state_dict({"rows": 7, "fingerprint": "another"})
    assert lines.split("train") is not rows
    alone = Lines(val=3)
    alone.load_state_dict({"rows": 7, "fingerprint": "another"})
    assert alone.num_anchors == 7  # of the training run
    assert alone.state_dict() != {}


@pytest.mark.parametrize(
    ("stage", "arguments", "message"),
    [
        ("fit", {"val": 3}, "Lines has no rows of split 'train'"),
        ("fit", {"train": 3}, "batch_size 4 is larger than the data: there are 3 training rows"),
        ("validate", {"train": 4}, "Lines has no rows of split 'val'"),
        ("test", {"train": 4, "val": 4}, "Lines has no rows of split 'test'"),
        ("fit", {"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ("fit", {"batch_size": True}, "batch_size must be an integer of at least 1, got True"),
    ],
)
def test_what_there_is_not(stage, arguments, message):
    with pytest.raises(InputError, match=message):
        Lines(**arguments).setup(stage)


PATHS = {
    "features": ("FeatureDataModule", "SyntheticFeatureDataModule"),
    "image_text": ("ImageTextDataModule",),
    "imbalanced": ("ImbalancedImageDataModule",),
    "tabular": ("TabularRegressionDataModule",),
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PATHS.items() for name in names])
def test_class_paths_of_before_are_there(module, name):
    """As configurations and checkpoints have them."""
    found = getattr(import_module(f"scent_lightning.data.{module}"), name)
    assert found is getattr(data, name)
    assert issubclass(found, IndexedDataModule)

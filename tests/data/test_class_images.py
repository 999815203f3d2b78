"""Images in class folders: labels by name, splits, augmentation, and what feeds a backbone."""

import sys

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import v2

from scent_lightning.cli import main
from scent_lightning.data import ImageFolderDataModule
from scent_lightning.duals import SCENT
from scent_lightning.errors import InputError
from scent_lightning.tasks import ExtremeClassificationTask
from tests.conftest import ROOT
from tests.helpers import assert_resumed_is_the_same

CLASSES = ("ant", "bee", "cat", "dog")


def write(folder, classes=CLASSES, images=6, size=(20, 14)):
    """Images of a colour for each class, of a size that differs."""
    generator = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(images):
            colour = np.array([60 * CLASSES.index(name), 200 - 60 * CLASSES.index(name), 30 * number])
            pixels = generator.integers(0, 40, (size[1] + number, size[0], 3)) + colour
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / name / f"{number}.png")


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "train")
    write(tmp_path / "val", CLASSES[1:3], images=2)
    return tmp_path


def module(folder, **arguments):
    return ImageFolderDataModule(str(folder), **{"batch_size": 8, "image_size": 8, **arguments})


def test_labels_are_the_training_folders_in_order(folder):
    data = module(folder)
    data.setup("fit")
    assert (data.num_classes, data.num_anchors, data.classes) == (4, 24, list(CLASSES))
    assert data.class_counts.tolist() == [6, 6, 6, 6]
    images, labels, index = (torch.cat(parts) for parts in zip(*data.train_dataloader(), strict=True))
    assert (images.shape, images.dtype) == ((24, 3, 8, 8), torch.float32)
    assert torch.equal(labels, index // 6)
    (images, labels, index) = next(iter(data.val_dataloader()))
    assert (labels.tolist(), index.tolist()) == ([1, 1, 2, 2], [0, 1, 2, 3])  # of two of the four classes


def test_augmentation_is_drawn_from_seed_epoch_and_row(folder):
    """The same in whatever batch, new in every epoch, and none where there is to be none."""
    rows, shown = module(folder).existing("train"), module(folder, augment=False).existing("train")
    first = rows[list(range(6))][0]
    assert torch.equal(rows[[4, 2]][0], first[[4, 2]])
    assert not torch.equal(first, shown[list(range(6))][0])
    rows.fetch(rows.checked([0]))
    rows.epoch = 1
    assert not torch.equal(rows.fetch(np.arange(6))[0], first)
    assert torch.equal(shown[[3]][0], module(folder, augment=False, in_memory=True).existing("train")[[3]][0])


def test_an_augmentation_of_ones_own(folder):
    grey = v2.Compose([v2.Grayscale(3), v2.Resize((8, 8))])
    images = module(folder, augmentation=grey, mean=[0.0] * 3, std=[1.0] * 3).existing("train")[[0, 9]][0]
    assert torch.equal(images[:, 0], images[:, 2])
    assert 0 < images.max() <= 1
    for wrong in (nn.Identity(), v2.Resize((8, 9)), v2.Compose([v2.Resize((8, 8)), v2.ToDtype(torch.float32)])):
        with pytest.raises(InputError, match=r"augmentation must give images of uint8 and shape \(3, 8, 8\)"):
            module(folder, augmentation=wrong).existing("train")[[0]]


def test_a_part_of_the_training_images_validates(tmp_path):
    write(tmp_path / "train")
    data = module(tmp_path, val_fraction=0.25)
    assert (len(data.existing("train")), len(data.existing("val"))) == (18, 6)
    assert sorted([*data.existing("train").rows, *data.existing("val").rows]) == list(range(24))
    assert data.existing("val").augment is None
    assert data.data_summary()["validation"] == "6 rows of 'train'"
    assert (
        module(tmp_path, val_fraction=0.25, split_seed=1).existing("val").rows.tolist()
        != data.existing("val").rows.tolist()
    )


def test_summary_says_what_is_passed_over(folder):
    (folder / "train" / "empty").mkdir()
    (folder / "train" / ".hidden").mkdir()
    (folder / "train" / "ant" / "notes.txt").write_text("x")
    Image.new("RGB", (9, 9)).save(folder / "train" / "stray.png")
    data = module(folder)
    said = data.data_summary()
    assert said["classes"] == "4: ant, bee, cat, dog"
    assert said["training"] == "24 rows; 6 to 6 of each class"
    assert "in 'train' 2 files (1 .txt, 1 in no folder of a class)" in said["passed over"]
    assert "in 'train' folders that are hidden or without an image (.hidden, empty)" in said["passed over"]


def test_a_checkpoint_keeps_the_classes(folder, tmp_path):
    state = module(folder).state_dict()
    other = tmp_path / "other"
    write(other / "test", CLASSES[2:])
    data = module(other)
    data.load_state_dict(state)
    assert (data.num_classes, data.num_anchors) == (4, 24)
    assert data.existing("test")[[0, 6]][1].tolist() == [2, 3]
    same = module(folder)
    same.load_state_dict(state)
    assert same.changed_rows() == "none"
    Image.new("RGB", (9, 9)).save(folder / "train" / "dog" / "9.png")
    more = module(folder)
    more.load_state_dict(state)
    assert more.changed_rows() == "appended"


def test_resumed_within_an_epoch_it_is_the_same(folder):
    """The augmentation as well."""

    def make():
        data = module(folder)
        data.setup("fit")
        network = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.Tanh())
        return ExtremeClassificationTask(5, data.num_classes, data.num_anchors, SCENT(), backbone=network, lr=1.0), data

    assert_resumed_is_the_same(make, folder, step=4, max_epochs=3)  # of 3 steps an epoch


def test_the_command_line(folder, monkeypatch):
    """The configuration, with a network of torchvision's."""
    config = str(ROOT / "configs" / "xc_images.yaml")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["scent-lightning"])
    settings = ["--config", config, "--data.path", ".", "--trainer.accelerator", "cpu", "--data.batch_size", "8"]
    main(["fit", *settings, "--trainer.max_epochs", "1"])
    (folder / "predict").mkdir()
    (folder / "val" / "bee" / "0.png").rename(folder / "predict" / "a.png")
    (last,) = folder.glob("lightning_logs/version_0/checkpoints/last.ckpt")
    main(["predict", *settings, "--ckpt_path", str(last)])
    (file,) = folder.glob("lightning_logs/*/predictions.csv")
    table = pd.read_csv(file)
    assert sorted(table.loc[0, [f"class_{k}" for k in range(4)]].astype(int)) == [0, 1, 2, 3]
    assert len(table) == 1


@pytest.mark.parametrize(("change", "message"), [
    (lambda f: write(f / "test", ("ant", "bee")) or (f / "test" / "bee").rename(f / "test" / "eel"),
     "split 'test' has classes that the training rows do not have: eel$"),
    (lambda f: (f / "test" / "none").mkdir(parents=True), "split 'test' has no image: .* needs a folder of images"),
    (lambda f: None, "path needs a split 'test': missing split, there is no folder .*test; .* has: train, val"),
    (lambda f: (f / "val").rename(f / "test") and (f / "test" / "bee" / "0.png").write_text("no image"),
     r"cannot read .*0\.png as an image"),
])  # fmt: skip
def test_folders_that_cannot_be_used(folder, change, message):
    change(folder)
    with pytest.raises(InputError, match=message):
        list(module(folder).test_dataloader())


@pytest.mark.parametrize(("arguments", "message"), [
    ({"image_size": 0}, "image_size must be an integer of at least 1, got 0"),
    ({"val_fraction": 0.5}, r"val_fraction must be 0 where there is a folder .*val, got 0\.5"),
    ({"mean": [0.5]}, r"mean must be 3 finite numbers, got \[0.5\]"),
    ({"batch_size": 25}, "batch_size 25 is larger than the data: there are 24 training rows"),
    ({"path": "nowhere"}, "path nowhere is not a folder; it must hold a folder for each split"),
])  # fmt: skip
def test_arguments(folder, arguments, message):
    with pytest.raises(InputError, match=message):
        ImageFolderDataModule(**{"path": str(folder), "batch_size": 8, **arguments}).setup("fit")


def test_a_fraction_that_leaves_nothing(tmp_path):
    write(tmp_path / "train")
    with pytest.raises(InputError, match=r"val_fraction 0.01 of 24 images leaves none to train or validate on"):
        module(tmp_path, val_fraction=0.01).setup("fit")

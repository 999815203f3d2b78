"""Imbalanced images and features: which rows, pixels and labels; augmentation, caching, loaders, every bad input."""

import errno
import os
import pickle
import re
import shutil

import lightning as L
import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision.transforms import v2

from scent_lightning.data.imbalanced import NORMALISATION, ImbalancedImageDataModule
from scent_lightning.duals import SOX
from scent_lightning.errors import InputError
from scent_lightning.tasks import PartialAUCTask
from tests.helpers import Steps, ddp_trainer, quiet_trainer, under_two_trainers

CLASSES = ("ant", "bee", "cat", "dog")
COUNTS = {"train": 20, "val": 3, "test": 4}  # images of a class


def pixels(split, label, number, size=(8, 8)):
    seed = [list(COUNTS).index(split), label, number]
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def write_images(folder, splits=("train", "val", "test"), size=(8, 8), classes=CLASSES):
    for split in splits:
        for label, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for number in range(COUNTS[split]):
                Image.fromarray(pixels(split, label, number, size)).save(folder / split / name / f"{number:03}.png")
    return folder


def write_features(folder, labels=None, splits=("train", "val", "test")):
    for split in splits:
        (folder / split).mkdir(parents=True)
        known = np.arange(4 * COUNTS[split]) % 4 if labels is None else np.asarray(labels)
        features = np.random.default_rng(len(known)).standard_normal((len(known), 5)).astype(np.float32)
        np.save(folder / split / "features.npy", features)
        np.save(folder / split / "labels.npy", known)
    return folder


def module(folder, **arguments):
    """The last two of the four classes are positive, and most of their training rows removed, unless told otherwise."""
    positive = [2, 3] if arguments.get("dataset") == "features" else ["cat", "dog"]
    usual = {"batch_size": 6, "eval_batch_size": 7, "positive_classes": positive, "removed_positives": 0.8}
    return ImbalancedImageDataModule(str(folder), **{**usual, **arguments})


def rows_of(loader):
    batches = list(loader)
    return tuple(torch.cat([batch[i] for batch in batches]) for i in range(3))


def normalised(images, dataset="folder"):
    """(B, H, W, 3) bytes as the model sees them."""
    mean, std = (np.array(numbers) for numbers in NORMALISATION[dataset])
    return torch.from_numpy(((images / 255 - mean) / std).astype(np.float32)).permute(0, 3, 1, 2)


def all_pixels(split, size=(8, 8)):
    return np.stack([pixels(split, label, number, size) for label in range(4) for number in range(COUNTS[split])])


# Rows and pixels


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_folder_is_read_as_it_is(tmp_path, in_memory, workers):
    data = module(write_images(tmp_path), removed_positives=0.0, in_memory=in_memory, num_workers=workers)
    for loader, split in (
        (data.train_eval_dataloader(), "train"),
        (data.val_dataloader(), "val"),
        (data.test_dataloader(), "test"),
        (data.predict_dataloader(), "test"),
    ):
        for _ in range(2):  # read, and kept
            inputs, labels, index = rows_of(loader)
            torch.testing.assert_close(inputs, normalised(all_pixels(split)))
            assert (inputs.dtype, labels.dtype, index.dtype) == (torch.float32, torch.int64, torch.int64)
            assert labels.tolist() == [0] * 2 * COUNTS[split] + [1] * 2 * COUNTS[split]
            assert index.tolist() == list(range(4 * COUNTS[split]))
    assert data.num_features is None


def test_removal(tmp_path):
    data = module(write_images(tmp_path))
    assert (data.num_positives, data.num_negatives, data.num_anchors) == (8, 40, 48)
    assert data.train_labels.tolist() == [0] * 40 + [1] * 8
    assert data.train_labels.dtype == torch.int64
    inputs, labels, index = rows_of(data.train_eval_dataloader())
    assert index.tolist() == list(range(48))
    assert torch.equal(labels, data.train_labels)
    source = data.split("train").rows
    assert source[:40].tolist() == list(range(40))
    assert (np.diff(source) > 0).all()
    torch.testing.assert_close(inputs, normalised(all_pixels("train")[source]))
    assert len(rows_of(data.val_dataloader())[1]) == 12

    assert np.array_equal(module(tmp_path).split("train").rows, source)
    assert not np.array_equal(module(tmp_path, seed=1).split("train").rows, source)
    for fraction, kept in ((0.0, 40), (0.5, 20), (0.81, 8), (0.9, 4)):
        assert module(tmp_path, removed_positives=fraction, positives_per_batch=1).num_positives == kept


@pytest.mark.parametrize(
    ("arguments", "groups"),
    [
        ({"positive_classes": ["bee"]}, [0, 1, 0, 0]),
        ({"positive_classes": [3, "ant"]}, [1, 0, 0, 1]),
        ({"positive_classes": ["3", "0"]}, [1, 0, 0, 1]),
        ({"positive_classes": None, "negative_classes": ["bee", 2]}, [1, 0, 0, 1]),
        ({"positive_classes": ["ant"], "negative_classes": ["dog"]}, [1, None, None, 0]),
    ],
)
@pytest.mark.parametrize("dataset", ["folder", "features"])
def test_groups(tmp_path, dataset, arguments, groups):
    if dataset == "folder":
        write_images(tmp_path)
    else:
        write_features(tmp_path)
        known = {name: number for number, name in enumerate(CLASSES)}
        arguments = {key: value and [known.get(entry, entry) for entry in value] for key, value in arguments.items()}
    data = module(tmp_path, dataset=dataset, removed_positives=0.0, **arguments)
    for split, loader in (("train", data.train_eval_dataloader()), ("val", data.val_dataloader())):
        numbers = np.arange(4 * COUNTS[split]) % 4 if dataset == "features" else np.repeat(range(4), COUNTS[split])
        expected = [groups[number] for number in numbers if groups[number] is not None]
        _, labels, index = rows_of(loader)
        assert labels.tolist() == expected
        assert index.tolist() == list(range(len(expected)))


@pytest.mark.parametrize(
    ("classes", "positive", "chosen"),
    [
        (("1", "2", "3", "4"), ["1"], ["1"]),
        (("1", "2", "3", "4"), [1], ["1"]),
        (("1", "2", "3"), [2], ["2"]),
        (("10", "9"), [9], ["9"]),
        (("-1", "0", "1"), [-1, 1], ["-1", "1"]),
        (("2", "bee", "cat"), ["cat", 2], ["2", "cat"]),
        (("007", "8"), ["007"], ["007"]),
        (("a", "no", "yes"), ["[yes, no]"], ["no", "yes"]),  # as the command line has [yes, no]
        (("1.0", "2.0"), ["[2.0]"], ["2.0"]),
        (("[a, b]", "a"), ["[a, b]"], ["[a, b]"]),
        (("a", "b", "c"), [2, "0"], ["a", "c"]),
    ],
)
def test_a_name_goes_before_a_position(tmp_path, classes, positive, chosen):
    data = module(write_images(tmp_path, ["train"], classes=classes), positive_classes=positive)
    found, groups = data._groups.grouping
    assert [name for name, group in zip(found, groups, strict=True) if group == 1] == chosen


@pytest.mark.parametrize(
    ("classes", "positive"),
    [
        (("1", "2", "3"), 0),  # a position, where other numbers are names
        (("1", "2", "3"), "0"),
        (("07", "08"), 7),  # [07] is 7 in YAML, and [010] is 8
        (("5", "ant", "bee"), 1),
        (("no", "yes", "zoo"), True),  # not position 1
    ],
)
def test_what_may_be_a_name_or_a_position_is_refused(tmp_path, classes, positive):
    write_images(tmp_path, ["train"], classes=classes)
    with pytest.raises(InputError, match=f"positive_classes has an unknown class {positive!r}; .*{', '.join(classes)}"):
        module(tmp_path, positive_classes=[positive])._groups.grouping  # noqa: B018


# Folders as systems and programs leave them

JUNK = (".ipynb_checkpoints", "__MACOSX", ".git", "@eaDir", "__pycache__", "$RECYCLE.BIN", "System Volume Information")


@pytest.mark.parametrize("splits", [["train"], ["val"], ["train", "val", "test"]])
def test_folders_that_are_no_classes(tmp_path, splits):
    """They move no position, whichever split they are in."""
    write_images(tmp_path)
    for split in splits:
        for name in (*JUNK, "a empty", "aa notes", "zz deep/empty"):
            (tmp_path / split / name).mkdir(parents=True)
        for name in ("__MACOSX", ".ipynb_checkpoints"):
            Image.fromarray(pixels("val", 0, 0)).save(tmp_path / split / name / "0.png")
        (tmp_path / split / "aa notes" / "._0.png").touch()
        (tmp_path / split / "aa notes" / "read me.txt").touch()
    data = module(tmp_path, positive_classes=[2, 3], removed_positives=0.0)
    data.setup("fit")
    assert data._groups.grouping.classes == list(CLASSES)
    for split, loader in (("train", data.train_eval_dataloader()), ("val", data.val_dataloader())):
        inputs, labels, _ = rows_of(loader)
        torch.testing.assert_close(inputs, normalised(all_pixels(split)))
        assert labels.tolist() == [0] * 2 * COUNTS[split] + [1] * 2 * COUNTS[split]
    none = ", ".join(sorted([*JUNK, "a empty", "aa notes", "zz deep"]))
    said = f"in {splits[0]!r} folders that are hidden or without an image ({none})"
    assert said in data.data_summary()["passed over"]


def test_a_class_that_cannot_be_looked_into_is_no_empty_one(tmp_path, monkeypatch):
    write_images(tmp_path)
    scandir = os.scandir

    def denied(path):
        if str(path).endswith("cat"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(InputError, match=r"cannot look into folder .*cat: Permission denied"):
        module(tmp_path).setup("fit")


def test_a_class_without_rows_to_evaluate_on(tmp_path):
    """Its folder is empty, which is not another set of classes."""
    data = module(write_images(tmp_path), removed_positives=0.0)
    empty("val/ant")(tmp_path)
    assert rows_of(data.val_dataloader())[1].tolist() == [0] * 3 + [1] * 6


def test_classes_of_an_older_checkpoint(tmp_path):
    """In which hidden and empty folders had become classes; they have no rows now, and the others keep their group."""
    state = module(write_images(tmp_path)).state_dict()
    groups = torch.tensor([0, 0, 1, 0, 1, 1, 1])
    state |= {"classes": [".ipynb_checkpoints", "__MACOSX", "ant", "bee", "cat", "dog", "empty"], "groups": groups}
    (tmp_path / "test" / "empty").mkdir()
    data = module(tmp_path)
    data.load_state_dict(state)
    assert rows_of(data.test_dataloader())[1].tolist() == [1] * 4 + [0] * 4 + [1] * 8


def test_which_files_are_images(tmp_path):
    """Their ending says so, in whatever case; the rest is counted, in folders within a class as well."""
    write_images(tmp_path, ["train", "test"])
    ant = tmp_path / "train" / "ant"
    for name in ("b.JPG", "c.jfif", "d.GIF", "e.TIFF", "f.webp", "g.Bmp", "h.jpe", "deep/i.pgm", "deep/J.PNG"):
        (ant / "deep").mkdir(exist_ok=True)
        form = {"jfif": "JPEG", "jpe": "JPEG", "jpg": "JPEG", "pgm": "PPM", "tiff": "TIFF"}
        image = Image.fromarray(np.full((8, 8, 3), 7, np.uint8))
        image.save(ant / name, format=form.get(name.split(".")[1].lower()))
    for name in ("._000.png", ".DS_Store", "x.heic", "y.HEIC", "z.avif", "Thumbs.db", "LICENSE", "deep/._i.png"):
        (ant / name).write_bytes(b"no image")
    (ant / ".ipynb_checkpoints").mkdir()
    Image.fromarray(pixels("val", 0, 0)).save(ant / ".ipynb_checkpoints" / "000-checkpoint.png")
    Image.fromarray(pixels("val", 0, 0)).save(tmp_path / "train" / "stray.png")
    data = module(tmp_path, removed_positives=0.0)
    inputs, _, _ = rows_of(data.train_eval_dataloader())
    torch.testing.assert_close(inputs[:20], normalised(all_pixels("train"))[:20])
    torch.testing.assert_close(inputs[29:], normalised(all_pixels("train"))[20:])
    shade = normalised(np.full((9, 8, 8, 3), 7))
    torch.testing.assert_close(inputs[20:29], shade, atol=0.03, rtol=0)
    assert data.data_summary()["passed over"] == (
        "in 'train' 9 files (3 hidden, 2 .heic, 1 .avif, 1 .db, 1 in no folder of a class, 1 without ending)"
    )


@pytest.mark.parametrize("place", [".", "predict", "predict/some folder"])
def test_files_that_are_not_predicted_are_counted(tmp_path, place, caplog):
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    for name in ("b.png", "A.PNG", "c.jfif"):
        Image.fromarray(pixels("val", 0, 0)).save(tmp_path / place / name, format="PNG")
    for name in ("._b.png", "d.heic", "e.svg"):
        (tmp_path / place / name).touch()
    if place == "predict/some folder":
        (tmp_path / "predict" / "__MACOSX").mkdir()
        Image.fromarray(pixels("val", 0, 0)).save(tmp_path / "predict" / "__MACOSX" / "b.png")
    with caplog.at_level("INFO"):
        loader = module(tmp_path).predict_dataloader()
    assert next(iter(loader))[0].shape == (3, 3, 8, 8)
    assert "passed over: 3 files (1 .heic, 1 .svg, 1 hidden)" in caplog.text


OBVIOUS = [
    ("negative", "positive"),
    ("Neg", "Pos"),
    ("0", "1"),
    ("-1", "1"),
    ("False", "True"),
    ("no", "YES"),
    ("ok", "defect"),
]


@pytest.mark.parametrize(("negative", "positive"), OBVIOUS)
def test_two_classes_of_obvious_names(tmp_path, negative, positive):
    """Only these need no word on which is positive; and no positive row is removed unless that is asked for."""
    write_images(tmp_path, classes=(negative, positive))
    data = ImbalancedImageDataModule(str(tmp_path), batch_size=6)
    data.setup("fit")
    assert dict(zip(*data._groups.grouping, strict=True)) == {negative: 0, positive: 1}
    assert (data.num_positives, data.num_negatives) == (20, 20)
    told = ImbalancedImageDataModule(str(tmp_path), batch_size=6, positive_classes=[negative])
    assert dict(zip(*told._groups.grouping, strict=True)) == {negative: 1, positive: 0}


@pytest.mark.parametrize("labels", [[0, 1], [-1, 1]])
def test_two_labels_of_obvious_values(tmp_path, labels):
    write_features(tmp_path, np.array(labels)[np.arange(40) % 2])
    data = ImbalancedImageDataModule(str(tmp_path), "features", batch_size=6)
    assert data._groups.grouping.classes == labels
    assert data._groups.grouping.groups.tolist() == [0, 1]
    assert (data.num_positives, data.num_negatives) == (20, 20)


@pytest.mark.parametrize("names", [("ok", "scratch"), ("a", "b"), ("neg", "other", "pos"), ("negative", "pos")])
def test_other_classes_need_a_word_on_which_are_positive(tmp_path, names):
    """For training and for evaluating without a checkpoint; to predict images of no class it does not matter."""
    write_images(tmp_path, classes=names)
    data = ImbalancedImageDataModule(str(tmp_path), batch_size=6)
    said = f"positive_classes must say which classes of .* are positive: {', '.join(sorted(names))} \\(only two classes"
    with pytest.raises(InputError, match=said):
        data.setup("fit")
    for loader in (data.val_dataloader, data.test_dataloader):
        with pytest.raises(InputError, match=said):
            loader()
    Image.fromarray(pixels("val", 1, 0)).save(tmp_path / "0.png")
    assert next(iter(data.predict_dataloader()))[0].shape == (1, 3, 8, 8)


def test_labels_need_a_word_on_which_are_positive(tmp_path):
    data = ImbalancedImageDataModule(str(write_features(tmp_path)), "features", batch_size=6)
    with pytest.raises(InputError, match=r"positive_classes must say which classes of .* are positive: 0, 1, 2, 3"):
        data.setup("fit")


def test_cifar_needs_no_word(tmp_path, monkeypatch):
    write_cifar(tmp_path, monkeypatch, torchvision.datasets.CIFAR10)
    data = ImbalancedImageDataModule(str(tmp_path), "cifar10", batch_size=6)
    assert data._groups.grouping.groups.tolist() == [0, 0, 1, 1]
    assert data.num_anchors == 120


def test_a_checkpoint_says_which_classes_are_positive(tmp_path):
    """Also one of a version that had a grouping and a removal by default: as it was, evaluated or trained on from."""
    old = module(write_images(tmp_path))
    state = old.state_dict()
    assert set(state) == {"classes", "groups", "num_features", "rows", "fingerprint"}
    for arguments, change in (({"removed_positives": 0.8}, "none"), ({}, "replaced")):
        data = ImbalancedImageDataModule(str(tmp_path), batch_size=6, **arguments)
        data.setup("test")  # as Lightning does it, before it has read the checkpoint
        data.load_state_dict(state)
        assert rows_of(data.test_dataloader())[1].tolist() == [0] * 8 + [1] * 8
        data.setup("fit")
        assert data.changed_rows() == change


def test_features(tmp_path):
    data = module(write_features(tmp_path), dataset="features", removed_positives=0.5)
    assert (data.num_features, data.num_positives, data.num_negatives) == (5, 20, 40)
    features = torch.from_numpy(np.load(tmp_path / "train" / "features.npy"))
    numbers = np.load(tmp_path / "train" / "labels.npy")
    rows = data.split("train").rows
    inputs, labels, index = rows_of(data.train_eval_dataloader())
    assert torch.equal(inputs, features[rows])
    assert labels.tolist() == (numbers[rows] >= 2).astype(int).tolist()
    for inputs, labels, index in data.train_dataloader():
        assert torch.equal(inputs, features[rows[index]])
        assert torch.equal(labels, data.train_labels[index])


def test_binary_features(tmp_path):
    labels = np.arange(40) % 4 == 1
    data = module(
        write_features(tmp_path, labels.astype(int)), dataset="features", positive_classes=None, removed_positives=0.0
    )
    assert torch.equal(data.train_labels, torch.from_numpy(labels).long())


def test_other_modes_become_rgb(tmp_path):
    write_images(tmp_path, ["train"])
    gray = np.arange(64, dtype=np.uint8).reshape(8, 8)
    color = np.dstack([pixels("train", 0, 1), np.full((8, 8), 255, np.uint8)])
    Image.fromarray(gray).save(tmp_path / "train" / "ant" / "000.png")
    Image.fromarray(color).save(tmp_path / "train" / "ant" / "001.png")
    inputs, _, _ = rows_of(module(tmp_path).train_eval_dataloader())
    torch.testing.assert_close(inputs[:2], normalised(np.stack([np.dstack([gray] * 3), color[..., :3]])))


def test_mean_and_std(tmp_path):
    data = module(write_images(tmp_path), mean=[0.0, 0.5, 1.0], std=[1.0, 2.0, 0.5])
    inputs, _, _ = rows_of(data.val_dataloader())
    expected = (all_pixels("val") / 255 - np.array([0.0, 0.5, 1.0])) / np.array([1.0, 2.0, 0.5])
    torch.testing.assert_close(inputs, torch.from_numpy(expected).float().permute(0, 3, 1, 2))


# Augmentation


def crops(image, padding):
    """Every crop of the padded (3, H, W) image, and its mirror image."""
    _, height, width = image.shape
    padded = torch.nn.functional.pad(image, (padding[1], padding[1], padding[0], padding[0]))
    for top in range(2 * padding[0] + 1):
        for left in range(2 * padding[1] + 1):
            crop = padded[:, top : top + height, left : left + width]
            yield crop
            yield crop.flip(2)


@pytest.mark.parametrize(("size", "padding"), [((8, 8), (1, 1)), ((16, 8), (2, 1))])
@pytest.mark.parametrize("in_memory", [True, False])
def test_training_images_are_crops(tmp_path, size, padding, in_memory):
    data = module(write_images(tmp_path, size=size), in_memory=in_memory, mean=[0.0] * 3, std=[1.0] * 3)
    images = torch.from_numpy(all_pixels("train", size)).permute(0, 3, 1, 2)[data.split("train").rows]
    allowed = [[crop.flatten() for crop in crops(image, padding)] for image in images]
    seen = set()
    loader = data.train_dataloader()
    for epoch in range(12):
        loader.sampler.set_epoch(epoch)
        for inputs, labels, index in loader:
            assert labels.tolist() == [1] * 3 + [0] * 3
            assert torch.equal(labels, data.train_labels[index])
            for found, row in zip((inputs * 255).round().to(torch.uint8), index.tolist(), strict=True):
                same = [i for i, crop in enumerate(allowed[row]) if torch.equal(crop, found.flatten())]
                assert same
                seen.update(same)
    assert len(seen) == len(allowed[0])  # every shift and both directions occur
    inputs, _, _ = rows_of(data.train_eval_dataloader())  # what is kept was not changed
    assert torch.equal((inputs * 255).round().to(torch.uint8), images)


def test_no_augmentation(tmp_path):
    data = module(write_images(tmp_path), augment=False)
    plain = rows_of(data.train_eval_dataloader())[0]
    for inputs, _, index in data.train_dataloader():
        assert torch.equal(inputs, plain[index])


@pytest.mark.parametrize("in_memory", [True, False])
def test_image_size(tmp_path, in_memory):
    write_images(tmp_path, size=(24, 40))
    odd = np.random.default_rng(9).integers(0, 256, (31, 17, 3), dtype=np.uint8)
    Image.fromarray(odd).save(tmp_path / "train" / "ant" / "000.png")
    data = module(tmp_path, image_size=14, in_memory=in_memory, mean=[0.0] * 3, std=[1.0] * 3)
    shown = v2.Compose([v2.Resize(16), v2.CenterCrop(14)])
    expected = shown(torch.from_numpy(odd).permute(2, 0, 1))
    for _ in range(2):
        inputs, _, _ = rows_of(data.train_eval_dataloader())
        assert inputs.shape == (48, 3, 14, 14)
        assert torch.equal((inputs[0] * 255).round().to(torch.uint8), expected)
        images = shown(torch.from_numpy(all_pixels("val", (24, 40))).permute(0, 3, 1, 2))
        inputs, _, _ = rows_of(data.val_dataloader())
        assert torch.equal((inputs * 255).round().to(torch.uint8), images)
    loader = data.train_dataloader()
    epochs = []
    for epoch in (0, 1, 0):
        loader.sampler.set_epoch(epoch)
        epochs.append(torch.cat([inputs for inputs, _, _ in loader]))
    first, second, again = epochs
    assert first.shape == (48, 3, 14, 14)
    assert not torch.isclose(first, second).flatten(1).all(1).any()
    assert torch.equal(first, again)
    plain = module(tmp_path, image_size=14, augment=False, mean=[0.0] * 3, std=[1.0] * 3)
    for inputs, _, index in plain.train_dataloader():
        assert torch.equal(inputs, rows_of(plain.train_eval_dataloader())[0][index])


def test_images_are_read_once(tmp_path):
    data = module(write_images(tmp_path), removed_positives=0.0)
    first = rows_of(data.train_eval_dataloader())[0]
    len(list(data.val_dataloader()))
    loader = data.train_dataloader()
    shutil.rmtree(tmp_path / "train")
    assert torch.equal(rows_of(data.train_eval_dataloader())[0], first)
    assert len(list(loader)) == 13
    data = module(write_images(tmp_path, ["train"]), in_memory=False)
    len(list(data.train_eval_dataloader()))
    shutil.rmtree(tmp_path / "train")
    with pytest.raises(InputError, match=r"cannot read .*000\.png as an image"):
        next(iter(data.train_eval_dataloader()))


# Loaders


@pytest.mark.parametrize("positives", [None, 1, 4])
@pytest.mark.parametrize("batches", [None, 3])
def test_training_batches(tmp_path, positives, batches):
    data = module(
        write_features(tmp_path), dataset="features", positives_per_batch=positives, batches_per_epoch=batches
    )
    loader = data.train_dataloader()
    assert len(loader) == len(list(loader)) == (batches or 8)
    for _, labels, _ in loader:
        assert labels.tolist() == [1] * (positives or 3) + [0] * (6 - (positives or 3))


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffle_has_the_seed_of_seed_everything(tmp_path, workers):
    write_features(tmp_path)
    orders = []
    for seed in (1, 1, 2):
        L.seed_everything(seed, verbose=False)
        data = module(tmp_path, dataset="features", num_workers=workers)
        loader = data.train_dataloader()
        assert loader.persistent_workers is (workers > 0)
        orders.append(rows_of(loader)[2].tolist())
    assert orders[0] == orders[1] != orders[2]


def test_splits_survive_pickling(tmp_path):
    """Loader processes that are not forked get the data set this way."""
    write_images(tmp_path / "images")
    write_features(tmp_path / "features")
    for data in (module(tmp_path / "images", image_size=7), module(tmp_path / "features", dataset="features")):
        for split in (data.split("train"), data.split("val")):
            again = pickle.loads(pickle.dumps(split))
            assert len(again) == len(split)
            _, labels, index = again[[3, 1]]
            assert torch.equal(labels, split[[3, 1]][1])
            assert index.tolist() == [3, 1]
            assert again[2][2] == 2
            assert len(again[[]][0]) == 0
            with pytest.raises(IndexError, match=f"the split has {len(split)} rows"):
                again[[len(split)]]


def test_validation_splits(tmp_path):
    write_images(tmp_path, ["train", "test"])
    data = module(tmp_path)
    assert len(rows_of(data.val_dataloader())[0]) == 16  # the test split
    assert data.val_dataloader().dataset is data.test_dataloader().dataset
    data = module(tmp_path, val_split="train")
    assert len(rows_of(data.val_dataloader())[0]) == 48
    shutil.rmtree(tmp_path / "test")
    data = module(tmp_path)
    data.setup("fit")
    data.setup("predict")
    assert data.val_dataloader() == []
    assert len(rows_of(data.predict_dataloader())[0]) == 48


def test_setup_reads_what_the_stage_needs(tmp_path):
    write_images(tmp_path)
    for name in CLASSES:
        (tmp_path / "train" / name / "000.png").write_bytes(b"not an image")
        (tmp_path / "val" / name / "000.png").unlink()
    for stage, loaded in (("test", {"test"}), ("validate", {"val"}), ("predict", {"test"})):
        data = module(tmp_path)
        data.setup(stage)
        assert set(data._source.opened) == loaded
    data = module(tmp_path)
    data.setup("fit")
    assert set(data._source.opened) == {"train", "val"}


def test_data_folder_of_the_environment(tmp_path, monkeypatch):
    write_features(tmp_path / "here")
    monkeypatch.setenv("SCENT_LIGHTNING_DATA", str(tmp_path))
    assert module("here", dataset="features").num_anchors == 48
    with pytest.raises(InputError, match="path nowhere is not a folder"):
        module("nowhere", dataset="features").setup("fit")


def test_trainer(tmp_path):
    data = module(write_images(tmp_path))
    model = Steps()
    quiet_trainer(max_epochs=2, num_sanity_val_steps=0).fit(model, data)
    assert len(model.seen["train"]) == 16
    assert model.seen["train"][:8] != model.seen["train"][8:]
    assert model.seen["val"] == 2 * list(range(12))
    quiet_trainer().test(model, data, verbose=False)
    quiet_trainer().predict(model, data)
    assert model.seen["test"] == model.seen["predict"] == list(range(16))


@pytest.mark.parametrize("workers", [0, 1])
def test_trainer_resumes_after_an_epoch(tmp_path, workers):
    """The order goes on with the next epoch, also where loader processes fetch ahead."""
    write_features(tmp_path / "data")
    seen = []
    for epochs, checkpoint in ((3, None), (1, None), (3, tmp_path / "one.ckpt")):
        L.seed_everything(0, verbose=False)
        model = Steps()
        data = module(tmp_path / "data", dataset="features", num_workers=workers)
        trainer = quiet_trainer(max_epochs=epochs)
        trainer.fit(model, data, ckpt_path=checkpoint)
        if epochs == 1:
            trainer.save_checkpoint(tmp_path / "one.ckpt")
        seen.append(model.seen["train"])
    assert seen[1] + seen[2] == seen[0]


class _Train:
    def __init__(self, folder):
        self.folder = folder

    def __call__(self, rank):
        L.seed_everything(0, verbose=False)
        model = Steps()
        data = module(self.folder, positives_per_batch=2)
        ddp_trainer(max_epochs=2, num_sanity_val_steps=0).fit(model, data)
        return model.seen["train"], model.seen["val"]


def test_two_trainers(tmp_path):
    write_images(tmp_path)
    (first, first_val), (second, second_val) = under_two_trainers(_Train(tmp_path))
    L.seed_everything(0, verbose=False)
    data = module(tmp_path, batch_size=12, positives_per_batch=4)
    loader = data.train_dataloader()
    together = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        together += [index.tolist() for _, _, index in loader]
    assert len(first) == len(second) == len(together) == 8
    for one, other, whole in zip(first, second, together, strict=True):
        assert one[:2] + other[:2] + one[2:] + other[2:] == whole
    assert set(first_val) | set(second_val) == set(range(12))


# CIFAR


def write_cifar(folder, monkeypatch, kind):
    """The official layout, of 4 classes; and images (N, 32, 32, 3) and labels of each split."""
    found = {}
    generator = np.random.default_rng(0)
    (folder / kind.base_folder).mkdir()

    def save(name, content):
        with open(folder / kind.base_folder / name, "wb") as file:
            pickle.dump(content, file)

    for split, files in (("train", kind.train_list), ("test", kind.test_list)):
        images, labels = [], []
        for name, _ in files:
            images.append(generator.integers(0, 256, (24, 3, 32, 32), dtype=np.uint8))
            labels.append(generator.permutation(np.arange(24) % 4))
            key = "labels" if kind is torchvision.datasets.CIFAR10 else "fine_labels"
            save(name, {"data": images[-1].reshape(24, -1), key: labels[-1].tolist()})
        found[split] = np.concatenate(images).transpose(0, 2, 3, 1), np.concatenate(labels)
    save(kind.meta["filename"], {kind.meta["key"]: list(CLASSES)})
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
    return found


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_cifar(tmp_path, monkeypatch, dataset):
    kind = getattr(torchvision.datasets, dataset.upper())
    found = write_cifar(tmp_path, monkeypatch, kind)
    data = module(tmp_path, dataset=dataset, removed_positives=0.5)
    data.prepare_data()
    data.setup("fit")
    images, numbers = found["train"]
    rows = data.split("train").rows
    negatives = (numbers < 2).sum()
    assert (data.num_negatives, data.num_positives) == (negatives, negatives // 2)
    inputs, labels, _ = rows_of(data.train_eval_dataloader())
    torch.testing.assert_close(inputs, normalised(images[rows], dataset))
    assert torch.equal(labels, torch.from_numpy((numbers[rows] >= 2).astype(int)))
    batch = next(iter(data.train_dataloader()))
    assert batch[0].shape == (6, 3, 32, 32)
    images, numbers = found["test"]
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        inputs, labels, _ = rows_of(loader)
        torch.testing.assert_close(inputs, normalised(images, dataset))
        assert torch.equal(labels, torch.from_numpy((numbers >= 2).astype(int)))
    assert module(tmp_path, dataset=dataset, positive_classes=["bee"])._groups.grouping.groups.tolist() == [0, 1, 0, 0]


def test_cifar_is_downloaded_when_asked(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("torchvision.datasets.CIFAR10.download", lambda self: asked.append(self.root))
    for download, hint in ((False, "set download to true, or unpack"), (True, "unpack")):
        data = module(tmp_path, dataset="cifar10", download=download)
        for stage in ("fit", "test"):
            message = (
                f"path .* has no whole cifar10: Dataset not found or corrupted; {hint} the archive so that .*-py is"
            )
            with pytest.raises(InputError, match=message):
                data.setup(stage)
    assert asked == [str(tmp_path)] * 2
    data = module(tmp_path, dataset="cifar10")
    data.prepare_data()
    assert len(asked) == 2


# Bad input


def images(change=lambda folder: None, **arguments):
    return lambda folder: change(write_images(folder, **arguments))


def features(change=lambda folder: None, **arguments):
    return lambda folder: change(write_features(folder, **arguments))


def remove(*names):
    return lambda folder: [shutil.rmtree(folder / name) for name in names]


def empty(*names):
    return lambda folder: [path.unlink() for name in names for path in (folder / name).iterdir()]


def labels(split, values):
    return lambda folder: np.save(folder / split / "labels.npy", np.asarray(values))


F = {"dataset": "features"}
CASES = [
    (images(), {"dataset": "mnist"}, "dataset must be one of cifar10, cifar100, folder, features, got 'mnist'"),
    (images(), {"batch_size": 1}, "batch_size must be an integer of at least 2, got 1"),
    (images(), {"batch_size": 2.5}, "batch_size must be an integer of at least 2, got 2.5"),
    (
        images(),
        {"positives_per_batch": 0},
        "positives_per_batch must be None or an integer from 1 to 5, got 0 with batch",
    ),
    (
        images(),
        {"positives_per_batch": 6},
        "positives_per_batch must be None or an integer from 1 to 5, got 6 with batch_size 6",
    ),
    (
        images(),
        {"removed_positives": 1.0},
        r"removed_positives must be a number in \[0, 1\), got 1.0",
    ),
    (
        images(),
        {"removed_positives": -0.1},
        r"removed_positives must be a number in \[0, 1\), got -0.1",
    ),
    (
        images(),
        {"removed_positives": float("nan")},
        r"removed_positives must be a number in \[0, 1\), got nan",
    ),
    (
        images(),
        {"removed_positives": "a"},
        r"removed_positives must be a number in \[0, 1\), got 'a'",
    ),
    (images(), {"removed_positives": 0.99}, "removed_positives 0.99 leaves split 'train' none of its 40 positive rows"),
    (images(), {"seed": -1}, "seed must be an integer of at least 0, got -1"),
    (images(), {"eval_batch_size": 0}, "eval_batch_size must be an integer of at least 1, got 0"),
    (images(), {"num_workers": -1}, "num_workers must be an integer of at least 0, got -1"),
    (images(), {"batches_per_epoch": 0}, "batches_per_epoch must be None or an integer of at least 1, got 0"),
    (images(), {"image_size": 0}, "image_size must be None or an integer of at least 1, got 0"),
    (images(), {"image_size": 32, "dataset": "cifar10"}, "image_size is only for dataset 'folder', got 32 with 'cifar"),
    (images(), {"mean": [0.0, 0.0]}, r"mean must be 3 finite numbers, got \[0.0, 0.0\]"),
    (images(), {"std": [1.0, 1.0, 0.0]}, r"std must be 3 finite numbers above 0, got \[1.0, 1.0, 0.0\]"),
    (features(), {"mean": [0.0] * 3, **F}, "mean is only for images, got .* with dataset 'features'"),
    (images(), {"positive_classes": []}, "positive_classes must name at least one class, got an empty list"),
    (images(), {"positive_classes": ["eel"]}, "unknown class 'eel'; known are numbers 0 to 3, or names: ant, bee, ca"),
    (
        images(),
        {"positive_classes": None, "negative_classes": [4]},
        "negative_classes has an unknown class 4; known are numbers 0 to 3",
    ),
    (images(), {"positive_classes": [-1]}, "positive_classes has an unknown class -1"),
    (features(), {"positive_classes": ["ant"], **F}, "unknown class 'ant'; known are numbers: 0, 1, 2, 3"),
    (
        images(),
        {"positive_classes": ["ant", "bee"], "negative_classes": ["cat", 1]},
        "positive_classes and negative_classes must not share a class, both have bee",
    ),
    (images(), {"positive_classes": list(CLASSES)}, "split 'train' has no negative row; negative classes: none"),
    (images(empty("val/dog", "val/cat")), {}, "split 'val' has no positive row; positive classes: cat, dog"),
    (
        images(empty("train/dog", "train/cat")),
        {},
        r"positive_classes has an unknown class 'cat'; .* \(no classes, as they are hidden or without an image: cat, d",
    ),
    (images(empty(*(f"train/{name}" for name in CLASSES))), {}, "split 'train' has no image: .* needs a folder of ima"),
    (
        images(empty("train/bee")),
        {"positive_classes": ["ant"]},
        "classes of the splits differ: 'train' and 'val' do not share bee",
    ),
    (
        images(),
        {"val_split": "vla"},
        "val_split 'vla': missing split, there is no folder .*vla; .* has: test, train, val",
    ),
    (images(), {"val_split": "Validation"}, "val_split 'Validation': missing split, .* has: test, train, val"),
    (images(remove("val")), {"test_split": "tset"}, "test_split 'tset': missing split, .* has: test, train"),
    (features(), {"val_split": "dev", **F}, "val_split 'dev': missing split, .* has: test, train, val"),
    (images(), {"val_split": "train", "dataset": "cifar10"}, "val_split is not for dataset 'cifar10', .* got 'train'"),
    (images(), {"test_split": "val", "dataset": "cifar100"}, "test_split is not for dataset 'cifar100', .* got 'val'"),
    (images(), {"batch_size": 18}, "positives_per_batch 9 is more than the 8 positive rows there are; allowed: 1 to 8"),
    (
        images(),
        {"batch_size": 45, "positives_per_batch": 4},
        "batch_size − positives_per_batch 41 is more than the 40 negative rows",
    ),
    (lambda folder: folder.rmdir(), {}, "path .* is not a folder; it must hold a folder for each split"),
    (images(remove("train")), {}, "path needs a split 'train': missing split, .* has: test, val"),
    (lambda folder: None, {}, "path needs a split 'train': missing split, .* has: no folder at all"),
    (images(remove("train/bee")), {}, "classes of the splits differ: 'train' and 'val' do not share bee"),
    (images(remove("val/bee", "val/ant")), {}, "classes of the splits differ: .* do not share ant, bee"),
    (images(remove(*(f"val/{name}" for name in CLASSES))), {}, "split 'val' has no class: .* needs a folder of images"),
    (images(empty(*(f"val/{name}" for name in CLASSES))), {}, "split 'val' has no image: .* needs a folder of images"),
    (features(remove("train")), F, "path needs a split 'train': missing split"),
    (features(lambda f: (f / "val" / "labels.npy").unlink()), F, "val has neither labels.npy nor labels.pt"),
    (
        features(labels("val", np.arange(12) % 5)),
        F,
        "labels of split 'val' .*: got 4 in row 4 .* known are: 0, 1",
    ),
    (
        features(labels("train", np.zeros(80, int))),
        {"positive_classes": [0], **F},
        "split 'train' has no negative row; negative classes: none",
    ),
    (features(labels("val", np.zeros(12, int))), F, "split 'val' has no positive row; positive classes: 2, 3"),
    (features(labels("train", np.zeros(80))), F, "labels.npy must hold integers, got float64"),
    (
        features(lambda f: np.save(f / "val" / "features.npy", np.ones((12, 3), np.float32))),
        F,
        "splits differ in the number of features: 'train' has 5, 'val' has 3",
    ),
]


@pytest.mark.parametrize(("prepare", "arguments", "message"), CASES)
def test_bad_data_and_arguments(tmp_path, prepare, arguments, message):
    prepare(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        module(tmp_path, **arguments).setup("fit")
    assert "\n" not in str(caught.value)


def test_both_groups_given_need_no_known_labels(tmp_path):
    write_features(tmp_path)
    labels("val", np.arange(12) % 5)(tmp_path)
    data = module(tmp_path, dataset="features", positive_classes=[1], negative_classes=[0], removed_positives=0.0)
    assert rows_of(data.val_dataloader())[1].tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(("stage", "argument"), [("validate", "val_split"), ("test", "test_split")])
def test_missing_evaluation_split(tmp_path, stage, argument):
    write_images(tmp_path, ["train"])
    with pytest.raises(InputError, match=f"{argument} '.*': missing split, there is no folder .* has: train"):
        module(tmp_path).setup(stage)


@pytest.mark.parametrize("content", [b"", b"not an image", "cut"])
def test_corrupt_image(tmp_path, content):
    write_images(tmp_path)
    path = tmp_path / "train" / "bee" / "004.png"
    path.write_bytes(path.read_bytes()[:90] if content == "cut" else content)
    data = module(tmp_path)
    with pytest.raises(InputError, match=f"cannot read {re.escape(str(path))} as an image: ") as caught:
        list(data.train_eval_dataloader())
    assert "\n" not in str(caught.value)


def test_images_of_two_sizes(tmp_path):
    write_images(tmp_path)
    path = tmp_path / "train" / "bee" / "004.png"
    Image.fromarray(np.zeros((8, 9, 3), np.uint8)).save(path)
    message = f"image_size must be given .*: {re.escape(str(path))} is 9 × 8 pixels, .*000.png is 8 × 8"
    with pytest.raises(InputError, match=message):
        list(module(tmp_path).train_eval_dataloader())


def test_features_with_nan(tmp_path):
    write_features(tmp_path)
    features = np.load(tmp_path / "train" / "features.npy")
    features[4, 0] = np.nan
    np.save(tmp_path / "train" / "features.npy", features)
    with pytest.raises(InputError, match="features of split 'train' are NaN or infinite in row 4"):
        list(module(tmp_path, dataset="features").train_eval_dataloader())


# New data are treated as the training run's were


@pytest.mark.parametrize("place", ["predict", "."])
@pytest.mark.parametrize("rows", [1, 5])
def test_unlabelled_features_are_predicted_from_a_checkpoint(place, rows, tmp_path):
    data = module(write_features(tmp_path / "old", splits=("train",)), dataset="features", positive_classes=[0])
    task = PartialAUCTask(data.num_anchors, SOX(0.5), data.num_features)
    trainer = quiet_trainer(max_epochs=1, limit_val_batches=0)
    trainer.fit(task, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["ImbalancedImageDataModule"]
    assert (saved["classes"], saved["groups"].tolist()) == ([0, 1, 2, 3], [1, 0, 0, 0])
    (tmp_path / "new" / place).mkdir(parents=True)
    features = np.random.default_rng(9).standard_normal((rows, 5)).astype(np.float32)
    np.save(tmp_path / "new" / place / "features.npy", features)
    new = module(tmp_path / "new", dataset="features")
    (found,) = quiet_trainer().predict(task, new, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert set(found) == {"index", "score"}
    torch.testing.assert_close(found["score"], task.scores(task(torch.from_numpy(features))).detach())
    new = ImbalancedImageDataModule.load_from_checkpoint(tmp_path / "a.ckpt", path=str(new.path), dataset="features")
    assert (new.num_features, new.num_anchors) == (5, data.num_anchors)


def test_grouping_of_the_training_run(tmp_path):
    """A file of test rows alone, where other labels occur, in which half of them would be positive."""
    data = module(write_features(tmp_path / "old", splits=("train",)), dataset="features", positive_classes=[0, 3])
    write_features(tmp_path / "new", labels=[3, 2, 2, 0, 3], splits=("test",))
    new = module(tmp_path / "new", dataset="features")
    new.setup("test")
    new.load_state_dict(data.state_dict())
    assert torch.cat([batch[1] for batch in new.test_dataloader()]).tolist() == [1, 0, 0, 1, 1]


def test_images_without_classes_are_predicted(tmp_path):
    write_images(tmp_path / "old")
    for number in range(3):
        Image.fromarray(pixels("val", 1, number, (8, 8))).save(tmp_path / f"{number}.png")
    inputs, labels, index = next(iter(module(tmp_path).predict_dataloader()))
    assert labels is None
    assert index.tolist() == [0, 1, 2]
    expected = np.stack([pixels("val", 1, number, (8, 8)) for number in range(3)])
    torch.testing.assert_close(inputs, normalised(expected))

"""Image-text pairs: which index, pixels and tokens; skipped pairs, loaders, shapes, shards, every bad input."""

import gzip
import io
import json
import pickle
import re
import sys
import tarfile
import warnings
from itertools import chain

import jsonargparse
import lightning as L
import numpy as np
import open_clip
import pandas as pd
import pytest
import torch
from PIL import Image

from scent_lightning.data import ImageTextDataModule
from scent_lightning.data.image_text import MEAN, STD
from scent_lightning.data.image_text.shards import Shard
from scent_lightning.data.image_text.table import TablePairs
from scent_lightning.data.shapes import CLASSES, COLOURS, NUM_CAPTIONS, Shapes
from scent_lightning.errors import InputError
from tests.helpers import Steps, ddp_trainer, quiet_trainer, under_two_trainers, unpack

SIZE = 8


def letters(captions):
    """A tokenizer of 12 letters."""
    return torch.tensor([[ord(letter) for letter in caption[:12].ljust(12)] for caption in captions])


def pixels(number, size=(SIZE, SIZE)):
    return np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)


def png(number, size=(SIZE, SIZE)):
    file = io.BytesIO()
    Image.fromarray(pixels(number, size)).save(file, "PNG")
    return file.getvalue()


def write_table(folder, rows=20, name="pairs.tsv", separator="\t", captions=None, paths=None, columns=()):
    """Pair i has image pixels(i), and a caption with i in it; ``captions`` and ``paths`` replace some."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    columns = dict(columns)
    lines = [separator.join(["filepath", "title", *columns])]
    for row in range(rows):
        (folder / "images" / f"{row}.png").write_bytes(png(row))
        path = (paths or {}).get(row, f"images/{row}.png")
        caption = (captions or {}).get(row, f"picture {row}")
        lines.append(separator.join([path, caption, *(values[row] for values in columns.values())]))
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def members(number, **changes):
    found = {"png": png(number), "txt": f"picture {number}".encode(), "json": b"{}"}
    found.update(changes)
    return {extension: content for extension, content in found.items() if content is not None}


def write_shard(path, samples):
    """Samples: key → extension → bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for key, sample in samples.items():
            for extension, content in sample.items():
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def write_shards(folder, counts=(5, 0, 7), changes=None):
    number = 0
    for shard, count in enumerate(counts):
        samples = {}
        for _ in range(count):
            samples[f"{number:06}"] = members(number, **(changes or {}).get(number, {}))
            number += 1
        write_shard(folder / f"{shard:03}.tar", samples)
    return str(folder / f"{{000..{len(counts) - 1:03}}}.tar")


def module(path=None, **arguments):
    defaults = {"image_size": SIZE, "tokenizer": letters, "batch_size": 4, "eval_batch_size": 7, "augment": False}
    return ImageTextDataModule(path=None if path is None else str(path), **{**defaults, **arguments})


def rows_of(loader):
    batches = list(loader)
    return tuple(torch.cat([batch[i] for batch in batches]) for i in range(3))


def normalised(numbers, size=(SIZE, SIZE)):
    images = np.stack([pixels(number, size) for number in numbers]) / 255
    return torch.from_numpy(((images - MEAN) / STD).astype(np.float32)).permute(0, 3, 1, 2)


def check_pairs(batch, numbers, index=None):
    """The batch has pairs ``numbers``, by default at the index of the same number."""
    images, texts, found = batch
    assert found.tolist() == list(numbers if index is None else index)
    torch.testing.assert_close(images, normalised(numbers))
    assert torch.equal(texts, letters([f"picture {number}" for number in numbers]))
    assert (images.dtype, texts.dtype, found.dtype) == (torch.float32, torch.int64, torch.int64)


# Tables


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at_once", [0, 100])
def test_table_is_read_as_it_is(tmp_path, monkeypatch, in_memory, workers, at_once):
    monkeypatch.setattr(TablePairs, "tokenised_at_once", at_once)
    data = module(write_table(tmp_path), val_path=str(tmp_path / "pairs.tsv"), in_memory=in_memory, num_workers=workers)
    data.setup("fit")
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        for _ in range(2):  # read, and kept
            check_pairs(rows_of(loader), range(20))
    seen = []
    for batch in data.train_dataloader():
        check_pairs(batch, batch[2].tolist())
        seen += batch[2].tolist()
    assert sorted(seen) == list(range(20))
    assert data.num_anchors == 20
    assert data.captions("train") == data.captions("val") == [f"picture {row}" for row in range(20)]


def test_split_column(tmp_path):
    splits = ["train", "val", "test", "train"] * 5
    table = write_table(tmp_path, columns={"part": splits}, captions={2: ""})  # not in a split that is used
    data = module(table, split_column="part")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.setup("fit")
    train = [row for row, split in enumerate(splits) if split == "train"]
    val = [row for row, split in enumerate(splits) if split == "val"]
    assert data.num_anchors == 10
    check_pairs(rows_of(data.val_dataloader()), val, range(5))
    for batch in data.train_dataloader():
        check_pairs(batch, [train[i] for i in batch[2].tolist()], batch[2].tolist())
    assert data.captions("val") == [f"picture {row}" for row in val]
    data = module(table, split_column="part", train_split="val", val_split=None)
    assert (data.num_anchors, data.val_dataloader(), data.captions("val")) == (5, [], [])
    check_pairs(rows_of(data.predict_dataloader()), val, range(5))


# Classes


def test_classes_of_a_table(tmp_path):
    """By index, numbered over both splits, −1 where there is none; the batches are what they were."""
    splits = ["train", "val", "test", "train", "val"] * 4
    kinds = ["pear", "fig", "none of these", "apple", " kiwi ", "pear", "", "nor this", "apple", "fig"] * 2
    data = module(write_table(tmp_path, columns={"part": splits, "kind": kinds}), split_column="part")
    assert (data.class_names, data.labels("val").tolist()) == ([], [-1] * 8)
    with_classes = module(tmp_path / "pairs.tsv", split_column="part", class_column="kind")
    with_classes.setup("validate")
    assert with_classes.class_names == ["apple", "fig", "kiwi", "pear"]
    assert with_classes.labels("val").tolist() == [1, 2, -1, 1] * 2
    assert with_classes.labels("train").tolist() == [3, 0, 3, 0] * 2
    assert with_classes.labels("val").dtype == torch.int64
    for one, other in zip(rows_of(with_classes.val_dataloader()), rows_of(data.val_dataloader()), strict=True):
        assert torch.equal(one, other)
    alone = module(tmp_path / "pairs.tsv", class_column="kind")
    assert (len(alone.class_names), len(alone.labels("train")), alone.labels("val").tolist()) == (6, 20, [])
    both = module(tmp_path / "pairs.tsv", class_column="kind", val_path=str(tmp_path / "pairs.tsv"))
    assert torch.equal(both.labels("val"), alone.labels("train"))


@pytest.mark.parametrize("kind", ["size", "colour", "shape", "position"])
def test_classes_of_shapes_are_in_their_captions(kind):
    data = module(source="shapes", class_column=kind, rows=40, val_rows=60)
    patterns = {"size": r"a (\w+)", "colour": r"a \w+ (\w+)", "shape": r"a \w+ \w+ (\w+)", "position": ".* the (.*) on"}
    assert data.class_names == sorted(CLASSES[kind])
    for split in ("train", "val"):
        said = [re.match(patterns[kind], caption)[1] for caption in data.captions(split)]
        assert [data.class_names[label] for label in data.labels(split)] == said


def test_tokens_and_transform_are_those_of_validation(tmp_path):
    table = write_table(tmp_path, rows=4)
    (tmp_path / "images" / "1.png").write_bytes(png(1, (20, 13)))
    data = module(table, image_size=16, mean=[0.1, 0.2, 0.3], augment=True)
    images, texts, _ = rows_of(data.predict_dataloader())
    assert torch.equal(data.tokenize(data.captions("train")), texts)
    transform = pickle.loads(pickle.dumps(data.evaluation_transform))
    image = torch.from_numpy(pixels(1, (20, 13))).permute(2, 0, 1)
    torch.testing.assert_close(transform(image), images[1])


@pytest.mark.parametrize(
    ("name", "written", "separator"), [("a.csv", ",", None), ("a.tsv", "\t", None), ("a.csv", ";", ";")]
)
def test_separators_and_columns(tmp_path, name, written, separator):
    table = write_table(tmp_path, name=name, separator=written)
    table.write_text(table.read_text().replace("filepath", "file").replace("title", "text"))
    data = module(table, image_column="file", caption_column="text", separator=separator)
    check_pairs(rows_of(data.predict_dataloader()), range(20))


def test_captions_that_look_like_something_else(tmp_path):
    data = module(write_table(tmp_path, captions={0: "None", 1: "nan", 2: "12", 3: ' "quoted" '}))
    assert data.captions("train")[:3] == ["None", "nan", "12"]
    assert data.num_anchors == 20


QUOTED = {
    "at the start": '"Hello, she said',
    "at the end": 'he called it "',
    "alone": '"',
    "around a word": '"big" dog',
    "two words": '"big" and "small"',
    "odd": '""big dog',
}


@pytest.mark.parametrize("quoted", QUOTED.values(), ids=QUOTED.keys())
def test_a_quotation_mark_swallows_no_row(tmp_path, quoted):
    data = module(write_table(tmp_path, captions={3: quoted, 5: '"a cat', 8: 'a "cat"'}))
    expected = {3: quoted, 5: '"a cat', 8: 'a "cat"'}
    assert data.captions("train") == [expected.get(row, f"picture {row}") for row in range(20)]
    check_pairs([part[9:] for part in rows_of(data.predict_dataloader())], range(9, 20))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_captions_that_pandas_has_written(tmp_path, name):
    """It encloses a text with the separator, a quotation mark or a line end."""
    captions = ['a "cat"', "a\tcat", "a, cat", 'a\ncat with "legs"', "a\n\ncat", '"', '"a\ncat"', "", " a cat\n", "cat"]
    write_table(tmp_path)
    for columns in (["filepath", "title", "part"], ["title", "part", "filepath"]):
        frame = pd.DataFrame({"filepath": [f"images/{i}.png" for i in range(10)], "title": captions, "part": "train"})
        frame[columns].to_csv(tmp_path / name, sep="," if name == "a.csv" else "\t", index=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the one without a caption
            found = module(tmp_path / name, split_column="part", val_split=None).captions("train")
        assert found == [caption.strip() for caption in captions]


WRITTEN = {
    "a byte-order mark": lambda content: b"\xef\xbb\xbf" + content,
    "carriage returns": lambda content: content.replace(b"\n", b"\r"),
    "both line ends": lambda content: content.replace(b"\n", b"\r\n"),
    "empty lines": lambda content: content.replace(b"\n", b"\n\n"),
    "no last line end": lambda content: content.rstrip(),
    "spaces in the header": lambda content: content.replace(b"title", b" title "),
    "compressed": gzip.compress,
}


@pytest.mark.parametrize("change", WRITTEN.values(), ids=WRITTEN.keys())
@pytest.mark.parametrize("separator", [",", "\t"])
def test_other_ways_to_write_the_same_table(tmp_path, change, separator):
    path = write_table(tmp_path, name="a.csv" if separator == "," else "a.tsv", separator=separator)
    content = change(path.read_bytes())
    path = path.with_name(f"{path.name}.gz") if change is gzip.compress else path
    path.write_bytes(content)
    check_pairs(rows_of(module(path).predict_dataloader()), range(20))


def test_short_rows_are_said(tmp_path):
    path = write_table(tmp_path)
    path.write_text(path.read_text().replace("\tpicture 4", "").replace("\tpicture 11", ""))
    data = module(path)
    with pytest.warns(UserWarning, match=r"2 rows of .* have fewer fields than the header, .*: lines 6, 13"):
        data.setup("fit")
    assert (data.num_anchors, data.skipped) == (20, {"train": 2})


def test_spaces_around_the_split(tmp_path):
    path = write_table(tmp_path, columns={"part": [" val", "val "] * 2 + [" train", "train"] * 8})
    data = module(path, split_column="part")
    assert (data.num_anchors, len(data.captions("val"))) == (16, 4)


def test_an_absolute_path_may_lead_elsewhere(tmp_path):
    elsewhere = tmp_path / "elsewhere.png"
    elsewhere.write_bytes(png(3))
    table = write_table(tmp_path / "data", paths={3: str(elsewhere), 4: "images/../images/4.png"})
    check_pairs(rows_of(module(table).predict_dataloader()), range(20))


@pytest.mark.parametrize("path", ["../elsewhere.png", "images/../../elsewhere.png", ".."])
def test_a_relative_path_may_not(tmp_path, path):
    table = write_table(tmp_path / "data", paths={7: path}, columns={"part": ["val"] * 5 + ["train"] * 15})
    with pytest.raises(InputError, match=f"image path '{re.escape(path)}' in row 7 .* of .* leads outside the table's"):
        module(table, split_column="part").setup("fit")


def test_data_folder_of_the_environment(tmp_path, monkeypatch):
    write_table(tmp_path / "here")
    write_shards(tmp_path / "shards")
    monkeypatch.setenv("SCENT_LIGHTNING_DATA", str(tmp_path))
    assert module("here/pairs.tsv").num_anchors == 20
    assert module("shards/*.tar", source="webdataset").num_anchors == 12


# Skipped pairs


BAD = {2: b"", 5: b"not an image", 6: png(6)[:90], 11: None, 12: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"}
GOOD = [row for row in range(20) if row not in BAD and row not in (0, 8)]


def spoil(folder):
    for row, content in BAD.items():
        path = folder / "images" / f"{row}.png"
        path.unlink() if content is None else path.write_bytes(content)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_pairs_are_skipped(tmp_path, workers):
    table = write_table(tmp_path, captions={0: "", 8: "   "})
    spoil(tmp_path)
    data = module(table, num_workers=workers, drop_last=False)
    with pytest.warns(UserWarning, match=r"'train': 2 of 20 pairs have no caption and are skipped: rows 0, 8 \(count"):
        data.setup("fit")
    assert (data.num_anchors, data.skipped) == (20, {"train": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_pairs(rows_of(data.predict_dataloader()), GOOD)
        assert data.skipped == {"train": 7}  # in shared memory, whichever process has read them
        seen = []
        for _ in range(2):
            for batch in data.train_dataloader():
                check_pairs(batch, batch[2].tolist()) if len(batch[2]) else None
                seen += batch[2].tolist()
    assert sorted(seen) == sorted(2 * GOOD)
    assert data.skipped == {"train": 7}
    assert data.captions("train")[0] == ""
    with pytest.warns(UserWarning, match="split 'train': 7 of 20 pairs were skipped"):
        data.teardown("fit")


def test_the_first_bad_pairs_are_named(tmp_path):
    table = write_table(tmp_path)
    for row in range(12):
        (tmp_path / "images" / f"{row}.png").write_bytes(b"broken")
    (tmp_path / "images" / "1.png").unlink()
    data = module(table)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            list(data.predict_dataloader())
    said = [str(warning.message) for warning in caught]
    assert len(said) == 5
    assert re.search(r"pair 0 of split 'train' is skipped: cannot read .*0\.png as an image: cannot identify", said[0])
    assert re.search(r"pair 1 of split 'train' is skipped: .*1\.png does not exist", said[1])
    assert said[4].endswith("no more are named")
    assert data.skipped == {"train": 12}


def test_an_empty_batch_has_its_shapes(tmp_path):
    table = write_table(tmp_path)
    for row in range(7):
        (tmp_path / "images" / f"{row}.png").unlink()
    data = module(table)
    with pytest.warns(UserWarning, match="is skipped"):
        images, texts, index = next(iter(data.predict_dataloader()))
    assert (images.shape, texts.shape, index.shape) == ((0, 3, SIZE, SIZE), (0, 12), (0,))
    assert (images.dtype, texts.dtype, index.dtype) == (torch.float32, torch.int64, torch.int64)
    split = data.split("train")
    with pytest.raises(InputError, match="pair 3 of split 'train' has no caption or no readable image"):
        split[3]
    assert split[9][2] == 9


def test_no_pair_left(tmp_path):
    table = write_table(tmp_path)
    for row in range(20):
        (tmp_path / "images" / f"{row}.png").write_bytes(b"broken")
    with (
        pytest.warns(UserWarning, match="is skipped"),
        pytest.raises(InputError, match="split 'train' has no pair that can be used, of 20; the last one: cannot read"),
    ):
        list(module(table).predict_dataloader())


# Pixels and tokens


def test_constants_are_those_of_open_clip():
    assert (MEAN, STD) == (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)


def test_evaluation_is_open_clips(tmp_path):
    table = write_table(tmp_path, rows=4)
    ramp = np.add.outer(np.arange(40), np.arange(30))[..., None] * np.array([1, 2, 3]) % 256
    Image.fromarray(ramp.astype(np.uint8)).save(tmp_path / "images" / "0.png")
    found = rows_of(module(table, image_size=16).predict_dataloader())[0][0]
    expected = open_clip.image_transform(16, is_train=False)(Image.open(tmp_path / "images" / "0.png"))
    assert (found - expected).abs().max() < 2.5 / 255 / min(STD)  # rounded at other places
    assert (found - expected).abs().mean() < 0.5 / 255 / min(STD)


@pytest.mark.parametrize("in_memory", [True, False])
def test_augmented_images_are_crops(tmp_path, in_memory):
    table = write_table(tmp_path, rows=8)
    across = np.tile(np.linspace(0, 255, 40, dtype=np.uint8)[None, :, None], (40, 1, 3))
    for row in range(8):
        Image.fromarray(across).save(tmp_path / "images" / f"{row}.png")
    data = module(table, augment=True, crop_scale=(0.2, 0.5), in_memory=in_memory, mean=[0.0] * 3, std=[1.0] * 3)
    loader = data.train_dataloader()
    first = rows_of(loader)[0]
    loader.sampler.set_epoch(1)
    second = rows_of(loader)[0]
    assert first.shape == (8, 3, SIZE, SIZE)
    assert not torch.equal(first, second)
    for image in first:
        assert (image.diff(dim=2) >= 0).all()  # not mirrored: captions say left and right
        assert 0.2 < image[0, 0, -1] - image[0, 0, 0] < 0.9
    whole = rows_of(data.predict_dataloader())[0]
    assert torch.equal(whole[0], whole[1])
    assert whole[0, 0, 0, -1] - whole[0, 0, 0, 0] > 0.8
    data.setup("fit")
    assert data.split("train").pairs is data.split("predict").pairs


def test_other_modes_become_rgb(tmp_path):
    table = write_table(tmp_path, rows=4)
    gray = np.arange(64, dtype=np.uint8).reshape(8, 8)
    Image.fromarray(gray).save(tmp_path / "images" / "0.png")
    Image.fromarray(np.dstack([pixels(1), np.full((8, 8), 255, np.uint8)])).save(tmp_path / "images" / "1.png")
    Image.fromarray(gray).convert("P").save(tmp_path / "images" / "2.png")
    Image.fromarray(pixels(3)).save(tmp_path / "images" / "3.png", "WEBP", lossless=True)
    images = rows_of(module(table, mean=[0.0] * 3, std=[1.0] * 3).predict_dataloader())[0]
    expected = np.stack([np.dstack([gray] * 3), pixels(1), np.dstack([gray] * 3), pixels(3)])
    assert torch.equal((images * 255).round().to(torch.uint8), torch.from_numpy(expected).permute(0, 3, 1, 2))


def test_images_are_read_once(tmp_path):
    data = module(write_table(tmp_path), in_memory=True)
    first = rows_of(data.predict_dataloader())
    for row in range(20):
        (tmp_path / "images" / f"{row}.png").unlink()
    assert torch.equal(rows_of(data.predict_dataloader())[0], first[0])


@pytest.mark.parametrize("length", [None, 5])
def test_named_tokenizer(tmp_path, length):
    data = module(write_table(tmp_path), tokenizer="ViT-B-32", context_length=length)
    texts = rows_of(data.predict_dataloader())[1]
    assert torch.equal(texts, open_clip.get_tokenizer("ViT-B-32")([f"picture {i}" for i in range(20)], length or 77))


def test_without_open_clip(tmp_path, monkeypatch):
    table = write_table(tmp_path)
    monkeypatch.setitem(sys.modules, "open_clip", None)
    assert module(table).num_anchors == 20
    with pytest.raises(InputError, match=r"needs open_clip; install it with pip install 'scent-lightning\[vision\]'"):
        module(table, tokenizer="ViT-B-32").setup("fit")


# Shards


@pytest.mark.parametrize("how", ["braces", "glob", "folder", "wids", "list"])
@pytest.mark.parametrize("workers", [0, 2])
def test_shards(tmp_path, how, workers):
    pattern = write_shards(tmp_path / "shards")
    shards = [{"url": f"shards/{number:03}.tar", "nsamples": count} for number, count in enumerate((5, 0, 7))]
    (tmp_path / "wids.json").write_text(json.dumps({"wids_version": 1, "shardlist": shards}))
    (tmp_path / "list.json").write_text(json.dumps(shards))
    path = {
        "braces": pattern,
        "glob": tmp_path / "shards" / "*.tar",
        "folder": tmp_path / "shards",
        "wids": tmp_path / "wids.json",
        "list": tmp_path / "list.json",
    }[how]
    val = write_shard(tmp_path / "val.tar", {"a/000": members(20), "b/000": members(21)})
    data = module(path, source="webdataset", val_path=str(val), num_workers=workers)
    data.setup("fit")
    assert data.num_anchors == 12
    check_pairs(rows_of(data.val_dataloader()), [20, 21], [0, 1])
    for batch in data.train_dataloader():
        check_pairs(batch, batch[2].tolist())
    assert data.captions("train") == [f"picture {number}" for number in range(12)]
    assert data.skipped == {"train": 0, "val": 0}


def test_shards_of_a_folder(tmp_path, caplog):
    """In whatever case they end, and whatever the folder is called; other files are named."""
    folder = tmp_path / "of [1] June"
    write_shards(folder)
    (folder / "002.tar").rename(folder / "002.TAR")
    write_shard(folder / "._000.tar", {"a": members(7)})
    for name in ("003.tar.gz", "000.parquet"):
        (folder / name).touch()
    with caplog.at_level("INFO"):
        data = module(folder, source="webdataset")
        assert data.captions("train") == [f"picture {number}" for number in range(12)]
    assert "passed over, as they do not end in .tar: ._000.tar, 000.parquet, 003.tar.gz" in caplog.text


def test_an_index_opens_shards_when_they_are_read(tmp_path):
    write_shards(tmp_path, (5, 7))
    shards = [{"url": "000.tar", "nsamples": 5}, {"url": "001.tar", "nsamples": 8}]
    (tmp_path / "index.json").write_text(json.dumps({"shardlist": shards}))
    data = module(tmp_path / "index.json", source="webdataset")
    data.setup("fit")
    split = data.split("train")
    assert split.pairs._opened == {}
    check_pairs(split.__getitems__([4, 1]), [4, 1])
    with pytest.raises(InputError, match=r"shard .*001\.tar has 7 samples, the index says 8"):
        split.__getitems__([5])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"txt": None}, r"sample '000003' of .*000\.tar has no \.txt member"),
        ({"txt": b" \n"}, "sample '000003' of .* has no caption"),
        ({"txt": b"\xff\xfe"}, "the text of sample '000003' of .* is not UTF-8"),
        ({"txt": "picture 3".encode("utf-16-le")}, "the text of sample '000003' of .* has a NUL byte"),
        ({"png": None}, "sample '000003' of .* has no image"),
        ({"png": b"broken"}, "cannot read sample '000003' of .* as an image"),
        ({"png": png(3)[:90]}, "cannot read sample '000003' of .* as an image"),
        ({"png": None, "txt": None}, r"sample .* has no \.txt member"),
    ],
)
def test_bad_samples_are_skipped(tmp_path, change, reason):
    data = module(write_shards(tmp_path, changes={3: change}), source="webdataset")
    assert data.num_anchors == 12
    with pytest.warns(UserWarning, match=f"pair 3 of split 'train' is skipped: {reason}"):
        check_pairs(rows_of(data.predict_dataloader()), [i for i in range(12) if i != 3])
    assert data.skipped == {"train": 1}


def test_a_byte_order_mark_in_a_text_or_an_index(tmp_path):
    write_shards(tmp_path, changes={3: {"txt": b"\xef\xbb\xbfpicture 3"}, 6: {"txt": b"\xef\xbb\xbf picture 6\r\n"}})
    shards = [{"url": f"{number:03}.tar", "nsamples": count} for number, count in enumerate((5, 0, 7))]
    (tmp_path / "index.json").write_text("\ufeff" + json.dumps(shards), encoding="utf-8")
    check_pairs(rows_of(module(tmp_path / "index.json", source="webdataset").predict_dataloader()), range(12))


TWICE = {
    "the same again": ["0.png", "0.txt", "1.png", "1.txt", "0.png", "0.txt"],
    "next to each other": ["0.png", "0.txt", "0.png", "0.txt"],
    "another kind of image": ["0.png", "0.txt", "1.png", "1.txt", "0.jpg"],
    "another text": ["0.png", "0.txt", "1.png", "1.txt", "0.txt"],
    "in capitals": ["0.png", "0.PNG", "0.txt"],
    "in a folder": ["a/0.png", "a/0.txt", "b/0.png", "b/0.txt", "a/0.png", "a/0.txt"],
}


@pytest.mark.parametrize("names", TWICE.values(), ids=TWICE.keys())
def test_a_sample_twice_in_a_shard(tmp_path, names):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in names:
            content = png(0) if "txt" not in name else b"picture 0"
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with pytest.raises(InputError, match=r"shard .*a\.tar has sample '(a/)?0' twice"):
        module(tmp_path / "a.tar", source="webdataset", batch_size=1).setup("fit")


def test_other_members_of_a_sample_may_be_anywhere(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("0.json", "0.png", "0.webp", "1.png", "0.json", "0.txt", "1.txt", "1.json"):
            content = png(int(name[0])) if "txt" not in name else f"picture {name[0]}".encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    check_pairs(rows_of(module(tmp_path / "a.tar", source="webdataset", batch_size=1).predict_dataloader()), range(2))


@pytest.mark.parametrize("folder", ["shards[1]", "what?", "all*", "a[!b]{c,d}", "[[]", "{000..002}"])
@pytest.mark.parametrize("pattern", ["", "*.tar", "{000..002}.tar", "00[0-2].tar", "more*/../*.tar"])
def test_folders_named_like_patterns(tmp_path, folder, pattern):
    write_shards(tmp_path / folder)
    (tmp_path / folder / "more[2]").mkdir()
    write_shards(tmp_path / "shards1", (3,))
    path = tmp_path / folder / pattern
    check_pairs(rows_of(module(path, source="webdataset").predict_dataloader()), range(12))
    path = tmp_path / folder / "000.tar"
    assert module(path, source="webdataset").num_anchors == 5


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_nothing_is_unpickled(tmp_path):
    evil = pickle.dumps(Malice(tmp_path / "executed"))
    change = {"pyd": evil, "pickle": evil, "pkl": evil, "pth": evil, "cls": evil, "npy": evil, "json": evil}
    data = module(write_shards(tmp_path / "shards", changes=dict.fromkeys(range(12), change)), source="webdataset")
    check_pairs(rows_of(data.predict_dataloader()), range(12))
    change = {"png": evil, "txt": b"an image that is a pickle"}
    data = module(write_shards(tmp_path / "shards", changes={0: change}), source="webdataset")
    with pytest.warns(UserWarning, match="pair 0 of split 'train' is skipped"):
        check_pairs(rows_of(data.predict_dataloader()), range(1, 12))
    assert not (tmp_path / "executed").exists()
    pickle.loads(evil)
    assert (tmp_path / "executed").exists()


def test_only_regular_members_count(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        secret = tmp_path / "secret.txt"
        secret.write_text("secret")
        for name, kind, target in (("0.txt", tarfile.SYMTYPE, str(secret)), ("1.txt", tarfile.LNKTYPE, str(secret))):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, target
            archive.addfile(link)
        archive.add(secret, f"{'long' * 40}/é.txt")
        archive.add(secret, ".hidden.txt")
        archive.add(secret, "folder.d/noextension")
    shard = Shard(str(tmp_path / "a.tar"))
    assert list(shard.keys) == [f"{'long' * 40}/é"]
    assert shard.member(0, 1) == b"secret"
    assert shard.member(0, 0) is None


def test_shards_of_webdataset(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(6):
            writer.write({"__key__": f"{number:09}", "png": png(number), "txt": f"picture {number}", "json": {"a": 1}})
    check_pairs(rows_of(module(tmp_path / "a.tar", source="webdataset").predict_dataloader()), range(6))


@pytest.mark.parametrize("where", ["data", "header", "between", "garbage", "joined", "gzip", "empty"])
def test_spoiled_shard(tmp_path, where):
    pattern = write_shards(tmp_path)
    path = tmp_path / "002.tar"
    content = path.read_bytes()
    spans = Shard(str(path)).spans
    offset = int(spans[3, 0, 0])
    cut = {"data": offset + 10, "header": offset - 100, "between": offset - 512}.get(where)
    if cut is not None:
        path.write_bytes(content[:cut])
    elif where == "garbage":
        path.write_bytes(content[: offset - 512] + b"x" * 512 + content[offset:])
    elif where == "joined":
        path.write_bytes(content + (tmp_path / "000.tar").read_bytes())
    elif where == "gzip":
        path.write_bytes(gzip.compress(content))
    else:
        path.write_bytes(b"")
    with pytest.raises(
        InputError, match=r"shard .*002\.tar cannot be read as a whole, uncompressed tar file"
    ) as caught:
        module(pattern, source="webdataset").setup("fit")
    assert "\n" not in str(caught.value)


def test_shard_that_shrinks(tmp_path):
    pattern = write_shards(tmp_path)
    data = module(pattern, source="webdataset")
    data.setup("fit")
    path = tmp_path / "002.tar"
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(InputError, match=r"shard .*002\.tar is shorter than when it was opened"):
        rows_of(data.predict_dataloader())


# Shapes


@pytest.mark.parametrize("size", [16, 32, 57])
def test_shapes_depend_on_seed_split_and_row_alone(size):
    shapes = Shapes("train", 3, size)
    rows = np.array([7, 0, 100_000, 4032, 7])
    images = shapes.draw(rows, shapes.numbers(rows))
    assert (images.shape, images.dtype) == ((5, 3, size, size), np.uint8)
    assert np.array_equal(images[0], images[4])
    for position, row in enumerate(rows):
        again = Shapes("train", 3, size)
        alone = np.array([row])
        assert np.array_equal(again.draw(alone, again.numbers(alone))[0], images[position])
    for other in (Shapes("val", 3, size), Shapes("train", 4, size)):
        assert not np.array_equal(other.numbers(rows), shapes.numbers(rows))
        assert not np.array_equal(other.draw(rows, shapes.numbers(rows)), images)


def test_shapes_do_not_change():
    """The pairs of a seed are data: a result is only comparable if they stay."""
    shapes = Shapes("train", 0, 32)
    rows = np.arange(8)
    numbers = shapes.numbers(rows)
    assert numbers.tolist() == [1383, 2344, 1051, 3084, 3226, 3296, 274, 759]
    assert int(shapes.draw(rows, numbers).astype(np.int64).sum()) == pytest.approx(3238578, rel=1e-4)


def test_captions_of_shapes():
    captions = [Shapes.caption(number) for number in range(NUM_CAPTIONS)]
    assert len(set(captions)) == NUM_CAPTIONS == 4032
    assert max(len(caption.split()) for caption in captions) == 12
    tokens = open_clip.get_tokenizer("ViT-B-32", context_length=16)(captions)
    assert (tokens[:, 14] == tokens.max()).any()
    assert (tokens[:, 15] == 0).all()
    shapes = Shapes("val", 0, 32)
    for block in (0, 1):
        numbers = shapes.numbers(np.arange(NUM_CAPTIONS) + block * NUM_CAPTIONS)
        assert sorted(numbers) == list(range(NUM_CAPTIONS))


def test_pictures_are_what_captions_say():
    numbers = np.arange(NUM_CAPTIONS)
    images = Shapes("train", 0, 32).draw(numbers, numbers).astype(np.float64)
    colours = np.array(list(COLOURS.values()), dtype=np.float64)
    names = list(COLOURS)
    for number in range(0, NUM_CAPTIONS, 5):
        image, caption = images[number], Shapes.caption(number)
        found = re.fullmatch(r"a (\w+) (\w+) (\w+) at the ([\w ]+) on a (\w+) background", caption)
        size, colour, _, position, background = found.groups()
        distances = ((image[None] - colours[:, :, None, None]) ** 2).sum(1)
        inside = distances[names.index(colour)] < distances[names.index(background)]
        assert (95 if size == "large" else 28) < inside.sum() < (240 if size == "large" else 95), caption
        lines, columns = np.nonzero(inside)
        for found, low, high in ((columns, "left", "right"), (lines, "top", "bottom")):
            middle = (found.min() + found.max()) / 2
            expected = "low" if low in position else "high" if high in position else "middle"
            assert ("low" if middle < 12 else "high" if middle > 19 else "middle") == expected, caption


def test_shapes_module(tmp_path):
    data = module(source="shapes", image_size=32, rows=50, val_rows=30, augment=True)
    data.setup("fit")
    assert data.num_anchors == 50
    captions = data.captions("val")
    assert len(captions) == len(set(captions)) == 30
    images, texts, index = rows_of(data.val_dataloader())
    assert images.shape == (30, 3, 32, 32)
    assert torch.equal(texts, letters(captions))
    assert index.tolist() == list(range(30))
    assert data.skipped == {"train": 0, "val": 0}
    longer = module(source="shapes", image_size=32, rows=70, val_rows=40, eval_batch_size=3)
    assert torch.equal(rows_of(longer.val_dataloader())[0][:30], images)
    assert torch.equal(longer.split("train")[49][0], data.split("train")[49][0])
    for batch in data.train_dataloader():
        assert torch.equal(batch[1], letters([data.captions("train")[i] for i in batch[2]]))
    other = module(source="shapes", image_size=32, rows=50, val_rows=0, seed=1)
    other.setup("fit")
    assert (other.val_dataloader(), other.test_dataloader()) == ([], [])
    assert len(rows_of(other.predict_dataloader())[0]) == 50
    assert other.captions("train") != data.captions("train")
    with pytest.raises(InputError, match="val_rows must say what the validation rows are, there are none"):
        other.setup("test")


# Loaders


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [4, 4]), (False, [4, 4, 2])])
def test_drop_last(drop_last, sizes):
    data = module(source="shapes", rows=10, drop_last=drop_last)
    loader = data.train_dataloader()
    assert len(loader) == len(sizes)
    assert [len(batch[2]) for batch in loader] == sizes


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffle_has_the_seed_of_seed_everything(workers):
    orders = []
    for seed in (1, 1, 2):
        L.seed_everything(seed, verbose=False)
        loader = module(source="shapes", rows=40, num_workers=workers).train_dataloader()
        assert loader.persistent_workers is (workers > 0)
        orders.append(rows_of(loader)[2].tolist())
    assert orders[0] == orders[1] != orders[2]


def test_splits_survive_pickling(tmp_path):
    """Loader processes that are not forked get the data set this way."""
    table = module(write_table(tmp_path / "table"), augment=True)
    shards = module(write_shards(tmp_path / "shards"), source="webdataset")
    for data in (table, shards, module(source="shapes", tokenizer="ViT-B-32")):
        split = data.split("train")
        again = pickle.loads(pickle.dumps(split))
        _, texts, index = again.__getitems__([3, 1])
        assert torch.equal(texts, split.__getitems__([3, 1])[1])
        assert index.tolist() == [3, 1]
        with pytest.raises(IndexError, match=f"the split has {len(split)} rows"):
            again.__getitems__([len(split)])


def test_trainer(tmp_path):
    table = write_table(tmp_path, captions={4: ""})
    data = module(table, val_path=str(table))
    model = Steps()
    with pytest.warns(UserWarning, match="split 'train': 1 of 20 pairs were skipped"):
        quiet_trainer(max_epochs=2, num_sanity_val_steps=0).fit(model, data)
    assert len(model.seen["train"]) == 10
    assert model.seen["train"][:5] != model.seen["train"][5:]
    good = [row for row in range(20) if row != 4]
    assert sorted(chain(*model.seen["train"][:5])) == good
    assert model.seen["val"] == 2 * good
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet_trainer().test(model, data, verbose=False)
        quiet_trainer().predict(model, data)
    assert model.seen["test"] == model.seen["predict"] == good


def test_trainer_without_validation():
    data = module(source="shapes", rows=20, val_rows=0)
    model = Steps()
    quiet_trainer(max_epochs=1).fit(model, data)
    assert len(model.seen["train"]) == 5
    with pytest.raises(InputError, match="val_rows must say"):
        quiet_trainer().test(model, data)


class _Train:
    def __init__(self, folder):
        self.folder = folder

    def __call__(self, rank):
        L.seed_everything(0, verbose=False)
        model = Steps()
        data = module(self.folder / "pairs.tsv", val_path=str(self.folder / "pairs.tsv"))
        ddp_trainer(max_epochs=2, num_sanity_val_steps=0).fit(model, data)
        return model.seen["train"], model.seen["val"]


def test_two_trainers(tmp_path):
    write_table(tmp_path, rows=20)
    (first, first_val), (second, second_val) = under_two_trainers(_Train(tmp_path))
    assert len(first) == len(second) == 4  # two batches of four in each process and epoch, of ten rows
    for epoch in (slice(0, 2), slice(2, 4)):
        one, other = (set(chain(*seen[epoch])) for seen in (first, second))
        assert len(one) == len(other) == 8
        assert not one & other
    assert first[:2] != first[2:]
    assert set(first_val) | set(second_val) == set(range(20))


def test_command_line(tmp_path):
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(L.LightningDataModule, "data")
    arguments = [
        "--data=scent_lightning.data.ImageTextDataModule",
        "--data.source=shapes",
        "--data.image_size=16",
        "--data.crop_scale=[0.5, 1.0]",
        "--data.context_length=16",
        "--data.mean=[0, 0, 0]",
        "--data.rows=300",
    ]
    data = parser.instantiate(parser.parse_args(arguments)).data
    images, texts, _ = next(iter(data.train_dataloader()))
    assert (images.shape, texts.shape) == ((128, 3, 16, 16), (128, 16))
    assert tuple(data.looks.crop_scale) == (0.5, 1.0)


# Bad input


def table(change=None, **arguments):
    def prepare(folder):
        path = write_table(folder, **arguments)
        if change is not None:
            change(path)
        return path

    return prepare


def csv(**arguments):
    return table(name="pairs.csv", separator=",", **arguments)


def shards(folder):
    return write_shards(folder)


def text(content, name="index.json"):
    def prepare(folder):
        (folder / name).write_text(content)
        return folder / name

    return prepare


def nothing(folder):
    return None


W = {"source": "webdataset"}
S = {"source": "shapes"}
CASES = [
    (table(), {"source": "coco"}, "source must be one of table, webdataset, shapes, got 'coco'"),
    (nothing, {}, "path must be given for source 'table', got None"),
    (nothing, W, "path must be given for source 'webdataset', got None"),
    (table(), S, "path is not for source 'shapes', got"),
    (nothing, {**S, "val_path": "a"}, "val_path is not for source 'shapes', got 'a'"),
    (shards, {**W, "split_column": "a"}, "split_column is only for source 'table', got 'a' with 'webdataset'"),
    (shards, {**W, "class_column": "a"}, "class_column is not for source 'webdataset', got 'a'"),
    (nothing, {**S, "class_column": "a"}, "'shapes' must be one of size, shape, position, colour, got 'a'"),
    (table(), {"split_column": "a", "val_path": "b"}, "split_column and val_path must not both be given, got 'a', 'b'"),
    (table(), {"split_column": "a", "val_split": "train"}, "train_split and val_split must differ, got 'train' for"),
    (table(), {"separator": "||"}, r"separator must be one character, got '\|\|'"),
    (table(), {"image_size": 0}, "image_size must be an integer of at least 1, got 0"),
    (table(), {"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
    (table(), {"batch_size": 21}, "batch_size 21 is larger than the data: there are 20 training rows"),
    (table(), {"eval_batch_size": 0}, "eval_batch_size must be an integer of at least 1, got 0"),
    (table(), {"num_workers": -1}, "num_workers must be an integer of at least 0, got -1"),
    (nothing, {**S, "rows": 0}, "rows must be an integer of at least 1, got 0"),
    (nothing, {**S, "val_rows": -1}, "val_rows must be an integer of at least 0, got -1"),
    (nothing, {**S, "seed": -1}, "seed must be an integer of at least 0, got -1"),
    (table(), {"mean": [0.0, 0.0]}, r"mean must be 3 finite numbers, got \[0.0, 0.0\]"),
    (table(), {"std": [1.0, 1.0, 0.0]}, r"std must be 3 finite numbers above 0, got \[1.0, 1.0, 0.0\]"),
    (table(), {"crop_scale": (0.0, 1.0)}, r"crop_scale must be two ascending numbers in \(0, 1\], got \(0.0, 1.0\)"),
    (table(), {"crop_scale": (0.9, 0.5)}, "crop_scale must be two ascending numbers"),
    (table(), {"context_length": 16}, "context_length is for a tokenizer given by its name, got 16"),
    (
        table(),
        {"tokenizer": "V", "context_length": 2},
        "context_length must be None or an integer of at least 3, got 2",
    ),
    (table(), {"tokenizer": 3}, "tokenizer must be a name or a function, got 3"),
    (table(), {"tokenizer": "ViT"}, "tokenizer 'ViT' is not a model of open_clip; known are: "),
    (table(), {"tokenizer": "local-dir:/nowhere"}, "tokenizer 'local-dir:/nowhere' cannot be loaded: "),
    (table(), {"tokenizer": lambda captions: torch.ones(2)}, r"tokenizer must give integers of shape \(n, L\) for n"),
    (lambda folder: folder / "no.tsv", {}, r"path .*no\.tsv is not a file; it must be a table"),
    (table(), {"val_path": "no.tsv"}, r"val_path no\.tsv is not a file; it must be a table"),
    (table(), {"image_column": "url"}, r"image_column 'url' is not in .*pairs\.tsv; it has: filepath, title"),
    (table(), {"caption_column": "text"}, "caption_column 'text' is not in .*; it has: filepath, title"),
    (table(), {"class_column": "kind"}, "class_column 'kind' is not in .*; it has: filepath, title"),
    (table(), {"split_column": "split"}, "split_column 'split' is not in .*; it has: filepath, title"),
    (table(), {"separator": ","}, "image_column 'filepath' is not in"),
    (table(columns={"part": ["a"] * 20}), {"split_column": "part"}, "split_column 'part' of .* has no 'train'; it has"),
    (table(columns={"part": ["train"] * 20}), {"split_column": "part"}, "split_column 'part' of .* has no 'val'; it"),
    (table(rows=0), {}, "has no rows"),
    (table(lambda path: path.write_bytes(b"")), {}, "cannot read .* as a table"),
    (table(lambda path: path.write_bytes(b"\xff\xfe\x00\xd8\xff\t\n\xff")), {}, "cannot read .* as a table"),
    (table(lambda path: path.write_bytes(path.read_text().encode("utf-16"))), {}, "it is UTF-16: save it as UTF-8"),
    (table(captions={3: "caf\0"}), {}, "line 5 has a NUL byte"),
    (table(lambda path: path.write_bytes(path.read_bytes() + b"a\tcaf\xe9\n")), {}, "line 22 is not UTF-8"),
    (table(captions={7: "one\ttwo"}), {}, "line 9 has 3 fields where the header has 2"),
    (csv(captions={7: "a cat, on a mat"}), {}, "line 9 has 3 fields where the header has 2: a text with the separator"),
    (csv(captions={7: "a cat,"}), {}, "line 9 has 3 fields where the header has 2"),
    (csv(captions={7: '"a "big" cat"'}), {}, "the row from line 9 on has a quotation mark that is not closed or not"),
    (csv(captions={7: '"a cat'}), {}, "the row from line 9 on has a quotation mark that is not closed"),
    (csv(captions={7: "a\rcat"}), {}, "the row from line 9 on has .* or a line end that is not quoted"),
    (table(columns={"title": ["x"] * 20}), {}, "caption_column 'title' is more than once in"),
    (table(columns={" title ": ["x"] * 20}), {}, "caption_column 'title' is more than once in"),
    (table(captions={row: str(row) for row in range(20)}), {}, "caption_column 'title' .* must hold text, got nothing"),
    (table(captions=dict.fromkeys(range(20), "")), {}, "split 'train' has no caption in any of its 20 rows"),
    (
        table(lambda path: (path.parent / "images").rename(path.parent / "moved")),
        {},
        r"image_column 'filepath' of .* names no file: of 20 looked for, none is there, such as .*0\.png",
    ),
    (lambda folder: folder / "*.tar", W, r"path .*\.tar names no tar file that is there"),
    (lambda folder: folder, W, "path .* names no tar file that is there"),
    (lambda folder: "https://host/a.tar", W, "path must be local files, got 'https://host/a.tar'"),
    (lambda folder: "pipe:touch executed", W, "path must be local files, got 'pipe:touch executed'"),
    (
        lambda folder: write_shards(folder).replace("002", "003"),
        W,
        r"path .* has shards that are not there: .*003\.tar",
    ),
    (
        lambda folder: write_shards(folder).replace("000..002", "000,001,000"),
        W,
        r"names the shard .*000\.tar more than",
    ),
    (lambda folder: f"{write_shards(folder)}{{", W, "path .* has unbalanced braces"),
    (text('[{"url": "a.tar", "nsamples": 1}, {"url": "./a.tar", "nsamples": 1}]'), W, r"names the shard .* more than"),
    (lambda folder: write_shards(folder, (0,)), W, "split 'train' has no rows"),
    (lambda folder: folder / "no.json", W, r"path .*no\.json is not a file"),
    (text("[1]"), W, "must be JSON with a shardlist of url and nsamples each"),
    (text("{"), W, "must be JSON with a shardlist"),
    (text('{"shardlist": []}'), W, "lists no shards"),
    (text('[{"url": "a.tar"}]'), W, "must be JSON with a shardlist"),
    (text('[{"url": "../a.tar", "nsamples": 1}]'), W, r"must list local files .*, got '\.\./a\.tar'"),
    (text('[{"url": "pipe:touch x", "nsamples": 1}]'), W, "must list local files .*, got 'pipe:touch x'"),
    (
        text('[{"url": "a.tar", "nsamples": -1}]'),
        W,
        "nsamples in path .* must be an integer of at least 0, got -1 for 'a.tar'",
    ),
]


@pytest.mark.parametrize(("prepare", "arguments", "message"), CASES)
def test_bad_data_and_arguments(tmp_path, prepare, arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        module(prepare(tmp_path), **arguments).setup("fit")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_missing_validation(tmp_path, stage):
    with pytest.raises(InputError, match="val_path or split_column must say what the validation rows are"):
        module(write_table(tmp_path)).setup(stage)
    with pytest.raises(InputError, match="val_path must say what the validation rows are"):
        module(write_shards(tmp_path), source="webdataset").setup(stage)


def test_an_unknown_split():
    with pytest.raises(InputError, match="split must be one of train, val, got 'test'"):
        module(source="shapes").captions("test")
    with pytest.raises(InputError, match="split must be one of train, val, got 'test'"):
        module(source="shapes").labels("test")


# Real data


def test_emoji(data_dir, tmp_path):
    unpack(data_dir / "emoji" / "emoji.tar.gz", tmp_path)
    data = module(tmp_path / "emoji.tsv", split_column="split", class_column="category", image_size=16)
    data.setup("fit")
    assert data.num_anchors == 3466
    images, texts, index = rows_of(data.val_dataloader())
    assert (images.shape, texts.shape) == ((356, 3, 16, 16), (356, 12))
    assert index.tolist() == list(range(356))
    assert data.labels("val").bincount().tolist() == [14, 34, 4, 46, 20, 60, 64, 28, 50, 36]
    assert data.skipped == {"train": 0, "val": 0}

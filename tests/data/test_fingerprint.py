"""A fingerprint tells rows that were appended from rows that are others, whatever kind of data they are."""

import shutil

import numpy as np
import pytest
from PIL import Image

from scent_lightning.data import ImageTextDataModule, ImbalancedImageDataModule, SyntheticFeatureDataModule
from tests.data.test_image_text import letters, members, write_shard, write_table


def pairs(path, source="table"):
    return ImageTextDataModule(source=source, path=str(path), image_size=8, tokenizer=letters, batch_size=4)


def change(before, after):
    """What became of the rows of ``before`` in ``after``, with a new object for each, as in a run that is resumed."""
    before.setup("fit")
    state = before.state_dict()
    after.setup("fit")
    after.load_state_dict(state)
    found = after.changed_rows()
    assert after.changed_rows() == "none", "asked once for each checkpoint"
    return found


def shards(folder, names):
    """A shard of three pairs for each name, with pairs of its own."""
    for name in names:
        first = 10 * sum(map(ord, name))
        write_shard(folder / f"{name}.tar", {f"{name}{i}": members(first + i) for i in range(3)})
    return folder


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("bdf", "none"),
        ("bdfg", "appended"),
        ("bdfgh", "appended"),
        ("bcdf", "replaced"),  # arrived in the middle of the folder
        ("abdf", "replaced"),
        ("bd", "replaced"),
        ("bdg", "replaced"),
    ],
)
def test_shards(tmp_path, names, expected):
    before = pairs(shards(tmp_path / "before", "bdf"), "webdataset")
    assert change(before, pairs(shards(tmp_path / "after", names), "webdataset")) == expected


def test_shards_whose_insides_changed(tmp_path):
    for folder in ("before", "longer", "other"):
        shards(tmp_path / folder, "bdf")
    write_shard(tmp_path / "longer" / "d.tar", {str(i): members(i) for i in range(4)})
    write_shard(tmp_path / "other" / "d.tar", {str(i): members(i, txt=b"x" * 2000) for i in range(3)})
    for folder in ("longer", "other"):
        assert change(pairs(tmp_path / "before", "webdataset"), pairs(tmp_path / folder, "webdataset")) == "replaced"
    # The last one with another pair in it is another file: what it holds is not compared.
    shards(tmp_path / "grown", "bdf")
    write_shard(tmp_path / "grown" / "f.tar", {f"f{i}": members(10 * ord("f") + i) for i in range(4)})
    assert change(pairs(tmp_path / "before", "webdataset"), pairs(tmp_path / "grown", "webdataset")) == "replaced"


TABLES = {
    "the same": ({}, "none"),
    "appended": ({"rows": 14}, "appended"),
    "fewer": ({"rows": 9}, "replaced"),
    "another caption": ({"captions": {7: "something else"}}, "replaced"),
    "another image": ({"paths": {7: "images/2.png"}}, "replaced"),
    "put before the others": ({"captions": {i: f"picture {i - 1}" for i in range(12)}}, "replaced"),
}


@pytest.mark.parametrize("name", TABLES)
def test_caption_tables(tmp_path, name):
    arguments, expected = TABLES[name]
    before = write_table(tmp_path / "before", rows=12)
    after = write_table(tmp_path / "after", **{"rows": 12, **arguments})
    assert change(pairs(before), pairs(after)) == expected


def test_an_image_file_that_was_written_anew(tmp_path):
    before, after = (write_table(tmp_path / folder, rows=12) for folder in ("before", "after"))
    Image.fromarray(np.zeros((40, 40, 3), dtype=np.uint8)).save(tmp_path / "after" / "images" / "5.png")
    assert change(pairs(before), pairs(after)) == "replaced"


def image_folders(folder, classes):
    for name, numbers in classes.items():
        (folder / "train" / name).mkdir(parents=True)
        for number in numbers:
            pixels = np.random.default_rng(number).integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "train" / name / f"{number:03}.png")
    return image_module(folder)


def image_module(folder):
    return ImbalancedImageDataModule(
        str(folder),
        dataset="folder",
        positive_classes=["light"],
        removed_positives=0.0,
        batch_size=4,
        positives_per_batch=2,
        image_size=12,
    )


FOLDERS = {
    "the same": ({"dark": range(8), "light": range(20, 26)}, "none"),
    "appended to the last class": ({"dark": range(8), "light": range(20, 28)}, "appended"),
    "one more in the first class": ({"dark": range(9), "light": range(20, 26)}, "replaced"),
    "one less": ({"dark": range(7), "light": range(20, 26)}, "replaced"),
    "one in place of another": ({"dark": [*range(7), 9], "light": range(20, 26)}, "replaced"),
    "one before the others": ({"dark": range(8), "light": range(19, 26)}, "replaced"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_image_folders(tmp_path, name):
    classes, expected = FOLDERS[name]
    before = image_folders(tmp_path / "before", FOLDERS["the same"][0])
    assert change(before, image_folders(tmp_path / "after", classes)) == expected


def test_a_folder_that_moved_is_the_same(tmp_path):
    before = image_folders(tmp_path / "before", FOLDERS["the same"][0])
    before.setup("fit")
    state = before.state_dict()
    shutil.move(tmp_path / "before", tmp_path / "elsewhere")
    after = image_module(tmp_path / "elsewhere")
    after.setup("fit")
    after.load_state_dict(state)
    assert after.changed_rows() == "none"


def test_what_is_drawn():
    """Shapes and synthetic classes: more rows of one seed begin with those of fewer; another seed draws others."""

    def shapes(rows, seed=0):
        return ImageTextDataModule(
            source="shapes", image_size=8, tokenizer=letters, rows=rows, val_rows=0, batch_size=4, seed=seed
        )

    assert change(shapes(20), shapes(20)) == "none"
    assert change(shapes(20), shapes(30)) == "appended"
    assert change(shapes(20), shapes(20, seed=1)) == "replaced"

    def classes(**arguments):
        return SyntheticFeatureDataModule(
            **{"rows": 40, "num_classes": 5, "num_features": 4, "batch_size": 8, **arguments}
        )

    assert change(classes(), classes()) == "none"
    assert change(classes(), classes(seed=1)) == "replaced"
    assert change(classes(), classes(num_classes=6)) == "replaced"

"""Several captions of an image: groups by a column of the table, in batches, in training and in recall."""

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from scent_lightning.data import ImageTextDataModule
from scent_lightning.duals import BSGD, SCENT
from scent_lightning.errors import InputError
from scent_lightning.metrics import RetrievalRecall
from scent_lightning.tasks import CLIPTask
from tests.helpers import quiet_trainer
from tests.settings import ARCHITECTURE, letters

IMAGES = 6


@pytest.fixture
def table(tmp_path):
    """Six images with two captions each, and two of one; another split has its own groups."""
    generator = np.random.default_rng(0)
    lines = ["filepath,title,image,split"]
    for number in range(IMAGES + 2):
        pixels = generator.integers(0, 255, (16, 16, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        for caption in range(2 if number < IMAGES else 1):
            name = f"picture {number}" if number < IMAGES else ""
            lines.append(f"{number}.png,caption {caption} of {number},{name},{'val' if number % 2 else 'train'}")
    (tmp_path / "pairs.csv").write_text("\n".join(lines))
    return tmp_path / "pairs.csv"


def module(table, **arguments):
    given = {"image_size": 16, "tokenizer": letters, "batch_size": 4, "group_column": "image", "augment": False}
    return ImageTextDataModule(path=str(table), **{**given, **arguments})


def test_pairs_of_an_image_have_one_number(table):
    data = module(table, drop_last=False)
    data.setup("fit")
    rows = data.existing("train")
    images, texts, group, _ = rows[list(range(14))]
    assert len(images) == len(texts) == len(group) == 14
    assert group[:12].tolist() == np.repeat(np.arange(IMAGES), 2).tolist()
    assert len(set(group.tolist())) == IMAGES + 2  # a row without text is a group of its own
    assert torch.equal(rows[[13, 2, 3]][2], group[[13, 2, 3]])
    assert [part.shape for part in rows[5]] == [(3, 16, 16), (16,), (), ()]
    for batch in data.train_dataloader():
        assert torch.equal(batch[2], group[batch[3]])
    assert data.data_summary()["groups"] == "8, of column 'image'"


def test_groups_of_a_split(table):
    data = module(table, split_column="split")
    assert [len(data.existing(split)[[0, 1, 2]]) for split in ("train", "val", "test", "predict")] == [4] * 4
    assert data.existing("val")[list(range(7))][2].tolist()[:6] == [0, 0, 1, 1, 2, 2]


def test_a_pair_that_cannot_be_read_takes_no_group_with_it(table):
    (table.parent / "0.png").write_text("no image")
    rows = module(table).existing("train")
    with pytest.warns(UserWarning, match="0.png"):
        _, _, group, index = rows[[1, 2, 12]]
    assert index.tolist() == [2, 12]
    assert group[0] == 1


def test_without_a_column_batches_are_as_ever(table):
    data = module(table, group_column=None)
    assert [len(batch) for batch in data.train_dataloader()] == [3] * 3
    assert "groups" not in data.data_summary()


def test_training_and_recall_know_the_groups(table):
    """A batch of the two captions of one image has no sample; in recall either caption is right."""
    L.seed_everything(0, verbose=False)
    data = module(table, split_column="split", eval_batch_size=3)
    data.setup("fit")
    task = CLIPTask(data.num_anchors, BSGD(), architecture=ARCHITECTURE)
    images, texts, group, index = data.existing("train")[[0, 1, 2, 3]]
    with torch.no_grad():
        image, text = task(images, texts)
    task.training_step((images, texts, group, index), 0)
    scores = (image @ text.T - (image * text).sum(dim=1, keepdim=True)) / task.tau.detach()
    expected = torch.log(1e-6 + torch.stack([scores[i, [2, 3] if i < 2 else [0, 1]].exp().mean() for i in range(4)]))
    torch.testing.assert_close(task.duals["image"].nu[:4], expected, atol=1e-4, rtol=1e-4)
    task = CLIPTask(data.num_anchors, SCENT(), architecture=ARCHITECTURE, lr=1e-3)
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(task, datamodule=data)
    found = trainer.validate(task, data, verbose=False)[0]
    metric = RetrievalRecall()
    images, texts, group, index = data.existing("val")[list(range(7))]
    with torch.no_grad():
        metric.update(*task(images, texts), group, index)
    for name, value in metric.compute().items():
        assert found[f"val/{name}"] == pytest.approx(value.item())
    assert len(trainer.predict(task, data)) == 3


@pytest.mark.parametrize(("arguments", "message"), [
    ({"group_column": "nothing"}, "group_column 'nothing' is not in .*; it has: filepath, title, image, split"),
    ({"source": "shapes", "path": None}, "group_column is for source 'table', got 'image' with source 'shapes'"),
])  # fmt: skip
def test_columns_that_there_are_not(table, arguments, message):
    given = {"path": str(table), "image_size": 16, "tokenizer": letters, "batch_size": 4, "group_column": "image"}
    with pytest.raises(InputError, match=message):
        ImageTextDataModule(**{**given, **arguments}).setup("fit")

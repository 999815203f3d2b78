"""The panel of retrievals, as TensorBoard has it."""

import io

import matplotlib.image
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scent_lightning.callbacks import RetrievalPanel
from scent_lightning.callbacks.retrieval_panel import _right_answers, draw_retrievals
from scent_lightning.data import ImageTextDataModule
from scent_lightning.duals import BSGD
from scent_lightning.errors import InputError
from scent_lightning.tasks import CLIPTask
from tests.helpers import SoftmaxData, SoftmaxTask, quiet_trainer

TOWER = {"layers": 1, "width": 16}
ARCHITECTURE = {
    "embed_dim": 8,
    "vision_cfg": {**TOWER, "image_size": 16, "patch_size": 8, "head_width": 8},
    "text_cfg": {**TOWER, "context_length": 16, "vocab_size": 49408, "heads": 2},
}


def framed(figure, top):
    """Which places of each row have a frame."""
    rows = [figure.axes[start : start + top] for start in range(0, len(figure.axes), top)]
    return [[axes.spines["left"].get_visible() for axes in row] for row in rows]


def captions(figure, top):
    return [axes.get_title(loc="left") for axes in figure.axes[::top]]


def some(count=6):
    return torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(0)), torch.eye(count)


def test_own_picture_is_framed_and_nearest_first():
    pictures, images = some()
    queries = images[:2].clone()
    queries[1, 4] = 2.0  # another image is nearer to the second caption than its own
    figure = draw_retrievals(pictures, images, queries, ["first", "second"], top=3)
    assert framed(figure, 3) == [[True, False, False], [False, True, False]]
    assert captions(figure, 3) == ["first", "second"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["right: its own image, or one as good"]
    assert "6 images searched" in legend.get_title().get_text()


@pytest.mark.parametrize(
    ("group", "names", "frames"),
    [
        ([0, 1, 2, 3], ["a", "b", "a", "c"], [True, True, False]),  # an equal caption
        ([0, 1, 0, 3], ["a", "b", "c", "d"], [True, True, False]),  # of one group
        ([0, 1, 0, 3], ["a", "b", "c", "a"], [True, True, True]),  # both
        ([0, 1, 2, 3], ["", "", "", ""], [True, False, False]),  # without a caption no two are equal
    ],
)
def test_every_right_answer_is_framed(group, names, frames):
    pictures, images = some(4)
    query = torch.tensor([[1.0, 0.2, 0.8, 0.6]])
    right = _right_answers(torch.tensor(group), names, 1)
    figure = draw_retrievals(pictures, images, query, names[:1], top=3, right=right)
    assert framed(figure, 3) == [frames]


@pytest.mark.parametrize(
    ("own", "said"), [(0.1, " [right one at rank 6]"), (0.45, ""), (0.35, " [right one at rank 3]")]
)
def test_rank_of_a_right_one_that_is_not_shown(own, said):
    pictures, images = some()
    query = torch.tensor([[own, 0.2, 0.5, 0.4, 0.3, 0.25]])
    assert captions(draw_retrievals(pictures, images, query, ["mine"], top=2), 2) == ["mine" + said]


@pytest.mark.parametrize("caption", ["word " * 60, "x" * 400, "two\nlines\nand more", "", "図" * 300])
def test_long_captions_have_two_lines(caption):
    pictures, images = some()
    query = torch.tensor([[0.0, 1.0, 0.9, 0.8, 0.7, 0.6]])
    (drawn,) = captions(draw_retrievals(pictures, images, query, [caption], top=2), 2)
    assert drawn.count("\n") <= 1
    assert max(map(len, drawn.split("\n"))) <= 66
    assert drawn.replace("\n", " ").endswith("[right one at rank 6]")
    assert drawn.startswith(caption[:3])


def test_panel_in_tensorboard(tmp_path):
    data = ImageTextDataModule(
        source="shapes", image_size=16, context_length=16, rows=32, val_rows=20, batch_size=8, eval_batch_size=8
    )
    task = CLIPTask(32, BSGD(), architecture=ARCHITECTURE)
    logger = TensorBoardLogger(tmp_path)
    panel = RetrievalPanel(queries=3, items=12, every_n_epochs=2)
    trainer = quiet_trainer(max_epochs=3, logger=logger, callbacks=[panel], num_sanity_val_steps=2)
    trainer.fit(task, datamodule=data)
    trainer.test(task, datamodule=data, verbose=False)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert sorted(events.Tags()["images"]) == ["test/retrieval", "val/retrieval"]
    for name, step in (("val", 8), ("test", 12)):
        (image,) = events.Images(f"{name}/retrieval")
        assert matplotlib.image.imread(io.BytesIO(image.encoded_image_string), format="png").std() > 0.05
        assert image.step == step


def test_other_outputs_are_refused(tmp_path):
    panel = RetrievalPanel()
    trainer = quiet_trainer(max_epochs=1, logger=TensorBoardLogger(tmp_path), callbacks=[panel], num_sanity_val_steps=0)
    with pytest.raises(InputError, match="RetrievalPanel needs validation_step to return a dict"):
        trainer.fit(SoftmaxTask(24), SoftmaxData())
    with pytest.raises(InputError, match="queries must be an integer of at least 1, got 0"):
        RetrievalPanel(queries=0)

"""The panel of retrievals, as TensorBoard has it."""

import io

import matplotlib.image
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scent_lightning.callbacks import RetrievalPanel
from scent_lightning.callbacks.retrieval_panel import draw_retrievals
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


def test_own_picture_is_framed_and_nearest_first():
    pictures = torch.rand(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    images = torch.eye(6)
    queries = images[:2].clone()
    queries[1, 4] = 2.0  # another image is nearer to the second caption than its own
    figure = draw_retrievals(pictures, images, queries, ["first", "second"], top=3)
    framed = [[axes.spines["left"].get_visible() for axes in figure.axes[4 * row + 1 : 4 * row + 4]] for row in (0, 1)]
    assert framed == [[True, False, False], [False, True, False]]
    assert [figure.axes[0].texts[0].get_text(), figure.axes[4].texts[0].get_text()] == ["first", "second"]


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

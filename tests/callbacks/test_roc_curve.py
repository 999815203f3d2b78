"""The drawn ROC curve: what the picture holds, the file, TensorBoard, and runs under a Trainer."""

import io
import math

import lightning as L
import matplotlib.image
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from scent_lightning.callbacks import ROCCurve
from scent_lightning.callbacks import roc_curve as callback_module
from scent_lightning.callbacks.roc_curve import draw_roc_curve
from scent_lightning.errors import InputError
from scent_lightning.metrics.partial_auc import partial_auc, roc_curve
from tests.helpers import ddp_trainer, quiet_trainer, under_two_trainers


class Scorer(L.LightningModule):
    """Scores a row by its one feature, scaled; ``step_output`` makes what the evaluation steps return."""

    def __init__(self, step_output=None):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(30.0))
        self.step_output = step_output or (lambda score, label: {"score": score, "label": label})

    def training_step(self, batch, batch_idx):
        return self.scale.square() * batch[0].mean()

    def validation_step(self, batch, batch_idx):
        return self.step_output(self.scale * batch[0], batch[1])

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def rows(count=203, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(count, generator=generator) < 0.4).long()
    return torch.randn(count, generator=generator) + labels, labels


def loader(count=203, seed=0, labels=None):
    features, drawn = rows(count, seed)
    return DataLoader(TensorDataset(features, drawn if labels is None else labels), batch_size=50)


def image(path_or_bytes):
    pixels = matplotlib.image.imread(path_or_bytes, format="png")
    assert min(pixels.shape[:2]) > 300
    assert pixels[..., :3].std() > 0.02
    return pixels


def legend(figure):
    return "\n".join(text.get_text() for text in figure.axes[0].get_legend().get_texts())


@pytest.mark.parametrize("count", [200, 30_000])
def test_the_drawing_holds_the_curve_and_the_numbers(count):
    scores, labels = rows(count)
    figure = draw_roc_curve(1e4 * scores, labels, 0.3, "A title")
    axes = figure.axes[0]
    assert axes.get_title() == "A title"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("False positive rate", "True positive rate")
    for value in (
        partial_auc(scores, labels, 1.0),
        partial_auc(scores, labels, 0.3),
        partial_auc(scores, labels, 0.3, standardized=True),
    ):
        assert f"{value.item():.4f}" in legend(figure)
    assert "0.3" in legend(figure)

    drawn = torch.as_tensor(axes.lines[0].get_xydata())
    fpr, tpr = roc_curve(scores, labels)
    assert 2 < len(drawn) <= 2000
    assert drawn[0].tolist() == [0, 0]
    assert drawn[-1].tolist() == [1, 1]
    # Every drawn point is one of the curve's, and every point of the curve has a drawn one nearby.
    distances = torch.cdist(torch.stack([fpr, tpr], dim=1), drawn, compute_mode="donot_use_mm_for_euclid_dist")
    assert distances.min(dim=0).values.max() == 0
    assert distances.min(dim=1).values.max() < 2e-3
    shaded = axes.collections[0].get_paths()[0].vertices
    assert shaded[:, 0].max() == pytest.approx(0.3)


def test_a_million_rows_and_the_whole_range():
    generator = torch.Generator().manual_seed(1)
    labels = torch.rand(1_000_000, generator=generator) < 0.01
    scores = torch.randn(1_000_000, generator=generator) + labels
    figure = draw_roc_curve(scores, labels, 1.0)
    assert len(figure.axes[0].lines[0].get_xydata()) <= 2000
    assert f"{partial_auc(scores, labels, 1.0).item():.4f}" in legend(figure)


def test_fit_and_test_write_the_file_and_tensorboard(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    trainer = quiet_trainer(max_epochs=3, logger=logger, callbacks=[ROCCurve(max_fpr=0.2)], num_sanity_val_steps=2)
    module = Scorer()
    trainer.fit(module, loader(), loader())
    steps = [5, 10, 15]
    folder = tmp_path / "lightning_logs" / "version_0"
    validation = image(folder / "roc_curve_val.png")
    assert not (folder / "roc_curve_test.png").exists()
    trainer.test(module, loader(seed=1), verbose=False)
    assert (image(folder / "roc_curve_test.png") != validation).any()

    events = EventAccumulator(logger.log_dir, size_guidance={"images": 0})
    events.Reload()
    assert sorted(events.Tags()["images"]) == ["test/roc_curve", "val/roc_curve"]
    assert [event.step for event in events.Images("val/roc_curve")] == steps
    for event in events.Images("val/roc_curve"):
        assert image(io.BytesIO(event.encoded_image_string)).shape[:2] == (event.height, event.width)


def test_every_n_epochs_and_the_sanity_check(tmp_path, monkeypatch):
    drawn = []

    def recording(scores, labels, max_fpr, title):
        drawn.append((len(scores), title))
        return draw_roc_curve(scores, labels, max_fpr, title)

    monkeypatch.setattr("scent_lightning.callbacks.roc_curve.draw_roc_curve", recording)
    folder = tmp_path / "deep" / "folder"
    callback = ROCCurve(every_n_epochs=2, folder=folder)
    trainer = quiet_trainer(max_epochs=5, callbacks=[callback], num_sanity_val_steps=1, default_root_dir=tmp_path)
    module = Scorer()
    trainer.fit(module, loader(), loader())
    assert [count for count, _ in drawn] == [203, 203]
    assert [f"epoch {epoch}" in title for epoch, (_, title) in zip((1, 3), drawn, strict=True)] == [True, True]
    image(folder / "roc_curve_val.png")
    # Outside a fit every run draws.
    quiet_trainer(callbacks=[callback]).validate(module, loader(), verbose=False)
    assert len(drawn) == 3


def test_folders_of_other_loggers_and_of_none(tmp_path):
    quiet_trainer(callbacks=[ROCCurve()], default_root_dir=tmp_path / "root").test(Scorer(), loader(), verbose=False)
    image(tmp_path / "root" / "roc_curve_test.png")
    logger = CSVLogger(tmp_path / "csv")
    quiet_trainer(callbacks=[ROCCurve()], logger=logger).test(Scorer(), loader(), verbose=False)
    image(tmp_path / "csv" / "lightning_logs" / "version_0" / "roc_curve_test.png")


def test_the_numbers_of_a_run_are_those_of_its_rows(tmp_path, monkeypatch):
    kept = {}
    monkeypatch.setattr(
        "scent_lightning.callbacks.roc_curve.draw_roc_curve",
        lambda scores, labels, max_fpr, title: (
            kept.update(figure=draw_roc_curve(scores, labels, max_fpr, title)) or kept["figure"]
        ),
    )
    quiet_trainer(callbacks=[ROCCurve(0.4, folder=tmp_path)]).validate(Scorer(), loader(), verbose=False)
    features, labels = rows()
    assert f"{partial_auc(features, labels, 0.4).item():.4f}" in legend(kept["figure"])


@pytest.mark.parametrize(
    ("step_output", "came"),
    [
        (lambda score, label: None, "got NoneType"),
        (lambda score, label: score.mean(), "got Tensor"),
        (
            lambda score, label: {"scores": score, "label": label},
            r"got dict of 'scores' \(Tensor\), 'label' \(Tensor\)",
        ),
        (lambda score, label: {"score": 3.0, "label": label}, r"got dict of 'score' \(float\), 'label' \(Tensor\)"),
    ],
)
def test_other_step_outputs(step_output, came, tmp_path):
    trainer = quiet_trainer(callbacks=[ROCCurve(folder=tmp_path)])
    message = "ROCCurve needs {} to return a dict with the tensors 'score' and 'label', each of shape .B,., "
    with pytest.raises(InputError, match=message.format("validation_step") + came):
        trainer.validate(Scorer(step_output), loader(), verbose=False)
    with pytest.raises(InputError, match=message.format("test_step") + came):
        trainer.test(Scorer(step_output), loader(), verbose=False)


def test_scores_of_a_wrong_shape(tmp_path):
    module = Scorer(lambda score, label: {"score": score.unsqueeze(1), "label": label})
    with pytest.raises(InputError, match=r"got shapes \(50, 1\) and \(50,\)"):
        quiet_trainer(callbacks=[ROCCurve(folder=tmp_path)]).test(module, loader(), verbose=False)


@pytest.mark.parametrize(("label", "missing"), [(0, "no positive rows"), (1, "no negative rows")])
def test_a_missing_class_is_skipped_with_a_warning(label, missing, tmp_path):
    labels = torch.full((203,), label)
    with pytest.warns(UserWarning, match=f"draws no test curve: it needs both classes but got {missing}"):
        quiet_trainer(callbacks=[ROCCurve(folder=tmp_path)]).test(Scorer(), loader(labels=labels), verbose=False)
    assert list(tmp_path.iterdir()) == []


def test_a_single_row(tmp_path):
    with pytest.warns(UserWarning, match="needs both classes"):
        quiet_trainer(callbacks=[ROCCurve(folder=tmp_path)]).test(Scorer(), loader(count=1), verbose=False)


def _write_own_share(rank, folder):
    trainer = ddp_trainer(callbacks=[ROCCurve(folder=folder / str(rank))], use_distributed_sampler=False)
    features, labels = rows(120)
    # Uneven: the second process has one class only, and more rows.
    order = labels.argsort(descending=True)
    mine = order[:60] if rank == 0 else order[60:]
    drawn = []
    module = Scorer()

    def recording(scores, labels, max_fpr, title):
        drawn.append((len(scores), partial_auc(scores, labels, 1.0).item()))
        return draw_roc_curve(scores, labels, max_fpr, title)

    callback_module.draw_roc_curve = recording
    trainer.test(module, DataLoader(TensorDataset(features[mine], labels[mine]), batch_size=20), verbose=False)
    return drawn


class _Work:
    def __init__(self, folder):
        self.folder = folder

    def __call__(self, rank):
        return _write_own_share(rank, self.folder)


def test_two_processes_make_one_picture(tmp_path):
    found = under_two_trainers(_Work(tmp_path))
    features, labels = rows(120)
    assert found[0] == [(120, pytest.approx(partial_auc(features, labels, 1.0).item(), abs=1e-12))]
    assert found[1] == []
    image(tmp_path / "0" / "roc_curve_test.png")
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize("value", [0, 1.5, math.nan, "0.3"])
def test_bad_max_fpr(value):
    with pytest.raises(InputError, match=r"max_fpr must be a number in \(0, 1\]"):
        ROCCurve(max_fpr=value)


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_bad_every_n_epochs(value):
    with pytest.raises(InputError, match="every_n_epochs must be an integer of at least 1"):
        ROCCurve(every_n_epochs=value)

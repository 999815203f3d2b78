"""A checkpoint's weights in files that other libraries read."""

import json
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch

from scent_lightning.cli import main as cli
from scent_lightning.duals import BSGD
from scent_lightning.errors import InputError
from scent_lightning.export import export
from scent_lightning.tasks import CLIPTask, DRORegressionTask, ExtremeClassificationTask
from tests.conftest import ROOT
from tests.helpers import quiet_trainer

TOWER = {"layers": 1, "width": 16}
ARCHITECTURE = {
    "embed_dim": 8,
    "vision_cfg": {**TOWER, "image_size": 8, "patch_size": 4, "head_width": 8},
    "text_cfg": {**TOWER, "context_length": 4, "vocab_size": 20, "heads": 2},
}


def exporter(monkeypatch):
    """The command's function; what open_clip learns of by its line is forgotten afterwards."""
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIG_PATHS", list(open_clip.factory._MODEL_CONFIG_PATHS))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", dict(open_clip.factory._MODEL_CONFIGS))
    return export


@pytest.mark.parametrize("given", ["dictionary", "file", "file of another checkpoint", "name"])
@pytest.mark.parametrize("out", ["exported/small_clip.pt", "it's an open.model.bin", "ViT-B-32.pth"])
def test_export_to_open_clip(tmp_path, monkeypatch, given, out):
    """What is printed is run as it is, from another folder."""
    monkeypatch.chdir(tmp_path)
    Path("small.json").write_text(json.dumps(ARCHITECTURE))
    known = {"dictionary": ARCHITECTURE, "name": "small"}.get(given, "small.json")
    export = exporter(monkeypatch)
    open_clip.add_model_config("small.json")
    task = CLIPTask(4, BSGD(), architecture=known, tau=0.05)
    trainer = quiet_trainer()
    trainer.strategy.connect(task)
    trainer.save_checkpoint("task.ckpt")
    if given == "file of another checkpoint":
        saved = torch.load("task.ckpt", weights_only=True)
        saved["hyper_parameters"]["architecture"] = "small.json"
        torch.save(saved, "task.ckpt")
    elif given == "file":
        Path("small.json").unlink()  # the checkpoint holds what was in it
    told = export(Path("task.ckpt"), Path(out))
    monkeypatch.chdir("/")
    names = {}
    exec(told, names)
    model = names["model"].eval()
    images, texts = torch.randn(3, 3, 8, 8), torch.randint(1, 20, (3, 4))
    expected = task.eval()(images, texts)
    found = model.encode_image(images, normalize=True), model.encode_text(texts, normalize=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert model.logit_scale.exp().item() == pytest.approx(20, rel=1e-5)


def test_export_of_an_architecture_whose_file_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = quiet_trainer()
    trainer.strategy.connect(CLIPTask(4, BSGD(), architecture=ARCHITECTURE, tau=0.05))
    trainer.save_checkpoint("task.ckpt")
    saved = torch.load("task.ckpt", weights_only=True)
    saved["hyper_parameters"]["architecture"] = "gone.json"
    torch.save(saved, "task.ckpt")
    export = exporter(monkeypatch)
    with pytest.raises(InputError, match=r"names gone\.json for its architecture, .* with --architecture FILE"):
        export(Path("task.ckpt"), Path("a.pt"))
    assert not Path("a.pt").exists()
    Path("again.json").write_text(json.dumps(ARCHITECTURE))
    assert "add_model_config" in export(Path("task.ckpt"), Path("a.pt"), "again.json")


def test_a_run_of_the_command_line_keeps_what_is_in_the_architectures_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = {**ARCHITECTURE["text_cfg"], "vocab_size": 49408}
    Path("small.json").write_text(json.dumps({**ARCHITECTURE, "text_cfg": text}))
    few = ["--data.rows", "8", "--data.val_rows", "0", "--data.batch_size", "8", "--data.image_size", "8"]
    few += ["--data.context_length", "4", "--trainer.max_steps", "1", "--trainer.limit_val_batches", "0"]
    few += ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--trainer.callbacks", "null"]
    cli(["fit", "--config", str(ROOT / "configs" / "clip_shapes.yaml"), "--model.architecture", "small.json", *few])
    Path("small.json").unlink()
    names = {}
    exec(exporter(monkeypatch)(Path("checkpoints/last.ckpt"), Path("own.pt")), names)
    assert names["model"].visual.image_size == (8, 8)


def saved(task) -> Path:
    trainer = quiet_trainer()
    trainer.strategy.connect(task)
    trainer.save_checkpoint("task.ckpt")
    return Path("task.ckpt")


@pytest.mark.parametrize("out", ["head.npy", "below/it's a head.pt", "head.bin"])
def test_a_linear_classifier_becomes_an_array(tmp_path, monkeypatch, capsys, out):
    monkeypatch.chdir(tmp_path)
    task = ExtremeClassificationTask(4, 6, 8, BSGD())
    task.head.weight.data.normal_()
    cli(["export", str(saved(task)), out])
    names = {}
    exec(capsys.readouterr().out, names)
    np.testing.assert_array_equal(np.asarray(names["weights"]), task.head.weight.detach().numpy())
    assert "bias" not in names


def test_a_linear_model_has_its_bias_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = DRORegressionTask(3, BSGD())
    task.network.bias.data.fill_(2.0)
    names = {}
    exec(export(saved(task), Path("model.npy")), names)
    assert names["weights"].shape == (1, 3)
    assert names["bias"].tolist() == [2.0]
    assert {path.name for path in tmp_path.glob("*.npy")} == {"model.npy", "model_bias.npy"}


@pytest.mark.parametrize(
    ("network", "out", "architecture", "message"),
    [
        (None, "a.csv", None, r"out must end in .npy or .pt, got 'a.csv'"),
        (None, "a.npy", "b.json", "architecture is for checkpoints of CLIPTask"),
        (torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)), "a.npy", None, "has neither a model of"),
    ],
)
def test_what_cannot_be_exported_is_told(tmp_path, monkeypatch, network, out, architecture, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        export(saved(DRORegressionTask(3, BSGD(), network=network)), Path(out), architecture)
    assert {path.name for path in tmp_path.iterdir()} == {"task.ckpt"}

"""Nothing in a checkpoint or in a data file is ever run, whichever way it comes in; it ends in one clear sentence."""

import importlib
import os
import pickle
import sys
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch

from scent_lightning.cli import main
from scent_lightning.data import FeatureDataModule
from scent_lightning.duals import BSGD
from scent_lightning.errors import InputError
from scent_lightning.tasks import (
    CLIPTask,
    DRORegressionTask,
    ExtremeClassificationTask,
    PartialAUCTask,
)
from tests.conftest import ROOT

CONFIG = str(ROOT / "configs" / "dro_diabetes.yaml")
RAN = "ran"


class Harmful:
    """Makes a folder where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (RAN,)


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Whatever torch is told to do where a program does not say.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    yield tmp_path
    assert not (tmp_path / RAN).exists()


def write(path, kind):
    """A file that makes a folder when it is read without care."""
    if kind == "checkpoint":
        state = {"pytorch-lightning_version": "2.6.0", "state_dict": {"w": torch.zeros(2)}, "callbacks": Harmful()}
        torch.save(state, path)
    elif kind == "old torch":
        torch.save({"state_dict": Harmful()}, path, _use_new_zipfile_serialization=False)
    else:
        path.write_bytes(pickle.dumps({"state_dict": Harmful()}))


KINDS = ["checkpoint", "old torch", "pickle"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_do_harm_where_they_are_read_without_care(tmp_path, kind):
    write(tmp_path / "a.ckpt", kind)
    if kind == "pickle":
        pickle.loads((tmp_path / "a.ckpt").read_bytes())
    else:
        torch.load(tmp_path / "a.ckpt", weights_only=False)
    (tmp_path / RAN).rmdir()


def refused_by_command_line(capsys, arguments) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    (line,) = (line for line in error.splitlines() if "error:" in line)
    assert line.startswith("scent-lightning: error: ")
    return line


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plugin", [None, "TorchCheckpointIO"])
def test_ckpt_path(tmp_path, capsys, subcommand, kind, plugin):
    write(tmp_path / "a.ckpt", kind)
    arguments = [subcommand, "--config", CONFIG, "--ckpt_path", "a.ckpt", "--trainer.logger", "false"]
    arguments += ["--trainer.plugins", plugin] if plugin else []
    line = refused_by_command_line(capsys, arguments)
    assert (
        "not only tensors and plain data" in line or "is of another kind" in line or "tensors and plain data: " in line
    )


def test_weights_only_cannot_be_switched_off(tmp_path, capsys):
    write(tmp_path / "a.ckpt", "checkpoint")
    arguments = ["fit", "--config", CONFIG, "--ckpt_path", "a.ckpt", "--weights_only", "false"]
    assert "weights_only must not be false" in refused_by_command_line(capsys, arguments)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", [DRORegressionTask, ExtremeClassificationTask, PartialAUCTask, CLIPTask])
def test_load_from_checkpoint(tmp_path, kind, task):
    write(tmp_path / "a.ckpt", kind)
    with pytest.raises(InputError, match=r"checkpoint .*a\.ckpt (holds a posix\.mkdir|is of another kind)"):
        task.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=False)


@pytest.mark.parametrize("kind", KINDS)
def test_export(tmp_path, kind, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.ckpt", kind)
    with pytest.raises(SystemExit) as stopped:
        main(["export", "a.ckpt", "b.pt"])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("scent-lightning: error: checkpoint a.ckpt ")
    assert not (tmp_path / "b.pt").exists()


ARCHITECTURE = {
    "embed_dim": 8,
    "vision_cfg": {"layers": 1, "width": 16, "image_size": 8, "patch_size": 4, "head_width": 8},
    "text_cfg": {"layers": 1, "width": 16, "context_length": 4, "vocab_size": 20, "heads": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a.pt", "a.bin", "a"])
@pytest.mark.parametrize("architecture", [ARCHITECTURE, "ViT-S-32-alt"], ids=["configuration", "name"])
def test_pretrained_of_clip(tmp_path, kind, name, architecture):
    write(tmp_path / name, kind)
    with pytest.raises(InputError, match=r"pretrained a.* (holds a posix\.mkdir|is of another kind)"):
        CLIPTask(4, BSGD(), architecture=architecture, pretrained=name)


@pytest.mark.parametrize("name", ["a.npz", "a.npy", "a.safetensors"])
def test_pretrained_of_clip_in_another_form(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(InputError, match=f"pretrained {name} does not fit the architecture"):
        CLIPTask(4, BSGD(), architecture=ARCHITECTURE, pretrained=name)


@pytest.mark.parametrize("kind", KINDS)
def test_backbone_of_partial_auc(tmp_path, kind):
    write(tmp_path / "a.pt", kind)
    task = PartialAUCTask(4, BSGD(), num_features=3)
    with pytest.raises(InputError, match=r"backbone_checkpoint a\.pt (holds a posix\.mkdir|is of another kind)"):
        task.load_backbone("a.pt")


@pytest.mark.parametrize("which", ["features", "labels"])
@pytest.mark.parametrize("form", ["object array", "pickle.npy", "tensor file", "old torch", "pickle.pt"])
def test_features(tmp_path, capsys, which, form):
    folder = tmp_path / "train"
    folder.mkdir()
    np.save(folder / "features.npy", np.zeros((4, 2), dtype=np.float32))
    np.save(folder / "labels.npy", np.zeros(4, dtype=np.int64))
    (folder / f"{which}.npy").unlink()
    if form == "object array":
        np.save(folder / f"{which}.npy", np.array([Harmful()] * 4, dtype=object), allow_pickle=True)
    elif form == "pickle.npy":
        (folder / f"{which}.npy").write_bytes(pickle.dumps(Harmful()))
    elif form == "tensor file":
        torch.save([Harmful()], folder / f"{which}.pt")
    elif form == "old torch":
        torch.save(Harmful(), folder / f"{which}.pt", _use_new_zipfile_serialization=False)
    else:
        (folder / f"{which}.pt").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(InputError, match=rf"cannot read .*{which}\.(npy|pt) as one plain array"):
        FeatureDataModule(str(tmp_path), batch_size=2).setup("fit")
    arguments = [
        "fit",
        "--config",
        str(ROOT / "configs" / "xc_glyphs.yaml"),
        "--data.path",
        ".",
        "--trainer.logger",
        "false",
    ]
    assert f"{which}." in refused_by_command_line(capsys, arguments)


@pytest.mark.parametrize("module", ["stranger", "strangers.inside", "scent_lightning_stranger"])
@pytest.mark.parametrize("way", ["task", "dictionary"])
def test_a_module_that_a_checkpoint_names_is_not_imported(module, way, nothing_runs, monkeypatch):
    """Not even to find out that it holds no dual update: its top level would run."""
    file = nothing_runs / (module.replace(".", "/") + ".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"import os\nos.mkdir({str(nothing_runs / RAN)!r})\n")
    if "." in module:
        (file.parent / "__init__.py").write_text(file.read_text())
    monkeypatch.syspath_prepend(str(nothing_runs))
    config = {"class_path": f"{module}.Update", "init_args": {}}
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=0)
    trainer.strategy.connect(DRORegressionTask(3, BSGD(), initial="zeros"))
    trainer.save_checkpoint("a.ckpt")
    saved = torch.load("a.ckpt", weights_only=True)
    saved["hyper_parameters"]["dual"] = config
    torch.save(saved, "a.ckpt")
    load = partial(DRORegressionTask.load_from_checkpoint, "a.ckpt")
    if way == "dictionary":
        load = partial(DRORegressionTask, 3, config)
    with pytest.raises(InputError, match=f"module that is not imported.*import {module} first, or pass the update"):
        load()
    assert module not in sys.modules


def test_a_module_that_is_imported_already(nothing_runs, monkeypatch):
    (nothing_runs / "own_updates.py").write_text(
        "from scent_lightning.duals import BSGD\n\n\nclass Own(BSGD):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(nothing_runs))
    monkeypatch.delitem(sys.modules, "own_updates", raising=False)
    own = importlib.import_module("own_updates").Own()
    again = DRORegressionTask(3, own.config(), initial="zeros").duals["nu"].update
    assert type(again) is type(own)
    monkeypatch.delitem(sys.modules, "own_updates")


HARMFUL_MODULE = """
import os

import torch

os.makedirs({folder!r}, exist_ok=True)


class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(3, 1))


class Optimizer(torch.optim.SGD):
    pass
"""
INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
NAMED = {
    "network": {"network": {"class_path": "stranger.Net"}},
    "short": {"network": "stranger.Net"},
    "inside": {
        "network": {
            "class_path": "torch.nn.TransformerEncoder",
            "init_args": {"encoder_layer": {"class_path": "stranger.Net"}, "num_layers": 1},
        }
    },
    "optimizer": {"optimizer": {"class_path": "stranger.Optimizer", "init_args": {"lr": 0.1}}},
    "task": {"_class_path": "stranger.Net"},
    "update": {"dual": {"class_path": "stranger.Net"}},
}


@pytest.fixture
def stranger(nothing_runs, monkeypatch):
    (nothing_runs / "stranger.py").write_text(HARMFUL_MODULE.format(folder=str(nothing_runs / RAN)))
    monkeypatch.syspath_prepend(str(nothing_runs))
    yield "stranger"
    sys.modules.pop("stranger", None)


def write_named(path, named, key="hyper_parameters", instantiator=INSTANTIATOR):
    """A checkpoint such as the command line's runs leave, with import paths in its hyperparameters."""
    task = DRORegressionTask(3, BSGD(), initial="zeros")
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=0)
    trainer.strategy.connect(task)
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    parameters = saved.pop("hyper_parameters")
    saved[key] = {**parameters, **named, "_instantiator": instantiator}
    torch.save(saved, path)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("way", ["path", "file", "older key"])
def test_no_module_of_a_class_in_the_hyperparameters_is_imported(name, way, stranger, nothing_runs):
    write_named("a.ckpt", NAMED[name], "module_arguments" if way == "older key" else "hyper_parameters")
    expected = pytest.raises((InputError, ValueError), match="stranger")
    with expected, open("a.ckpt", "rb") as file:
        DRORegressionTask.load_from_checkpoint(file if way == "file" else nothing_runs / "a.ckpt")
    assert stranger not in sys.modules


def test_one_sentence_says_what_to_import(stranger):
    write_named("a.ckpt", NAMED["network"])
    with pytest.raises(InputError, match=r"a\.ckpt names stranger\.Net, .*import stranger first, or pass"):
        DRORegressionTask.load_from_checkpoint("a.ckpt")
    assert all(type(finder).__name__ != "_Refusing" for finder in sys.meta_path)


def test_no_module_that_a_file_of_hyperparameters_names(stranger):
    write_named("a.ckpt", {})
    with open("hparams.yaml", "w") as file:
        file.write(
            f"num_features: 3\ndual: {{class_path: BSGD}}\nnetwork: stranger.Net\n_instantiator: {INSTANTIATOR}\n"
        )
    with pytest.raises(InputError, match=r"names stranger\.Net"):
        DRORegressionTask.load_from_checkpoint("a.ckpt", hparams_file="hparams.yaml")
    assert stranger not in sys.modules


@pytest.mark.parametrize("instantiator", ["os.system", "stranger.Net", "builtins.exec"])
def test_no_other_builder_of_the_task(instantiator, stranger):
    write_named("a.ckpt", {}, instantiator=instantiator)
    with pytest.raises(InputError, match=f"has the task built by '{instantiator}'"):
        DRORegressionTask.load_from_checkpoint("a.ckpt")
    assert stranger not in sys.modules


def test_classes_at_hand_are_used(stranger, nothing_runs):
    """Those of torch, those of a module that is imported already, and what the caller passes."""
    write_named(
        "a.ckpt", {"network": {"class_path": "torch.nn.Linear", "init_args": {"in_features": 3, "out_features": 1}}}
    )
    assert isinstance(load_weights("a.ckpt").network, torch.nn.Linear)
    write_named("b.ckpt", NAMED["network"])
    passed = load_weights("b.ckpt", network=torch.nn.Linear(3, 1))
    assert isinstance(passed.network, torch.nn.Linear)
    assert stranger not in sys.modules
    module = importlib.import_module(stranger)
    (nothing_runs / RAN).rmdir()
    assert isinstance(load_weights("b.ckpt").network, module.Net)


def load_weights(path, **arguments):
    return DRORegressionTask.load_from_checkpoint(path, strict=False, **arguments)

"""The command line as a user runs it: in a process of its own, in another folder."""

import csv
import logging
import pickle
import re
import shlex
import sys
import time
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from PIL import Image
from sklearn.datasets import load_diabetes
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scent_lightning.checkpoint import AtomicCheckpointIO
from scent_lightning.cli import main
from scent_lightning.data import TabularRegressionDataModule
from scent_lightning.lightning_cli import ScentCLI
from scent_lightning.modules import SmallImageResNet
from scent_lightning.tasks import DRORegressionTask
from tests.conftest import ROOT
from tests.forked import cold_command, finished, start_command
from tests.helpers import unpack
from tests.kill_and_resume import differences

CONFIG = str(ROOT / "configs" / "dro_diabetes.yaml")
SHORT = ["--trainer.max_epochs", "4", "--trainer.check_val_every_n_epoch", "2", "--trainer.log_every_n_steps", "5"]


def command(folder, *arguments) -> CompletedProcess:
    return finished(start_command(folder, *arguments, SCENT_LIGHTNING_DATA=None, COLUMNS="120"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished short run of the quick start, from the program's very start."""
    folder = tmp_path_factory.mktemp("cli")
    done = cold_command(folder, "fit", "--config", CONFIG, *SHORT)
    return folder, done, folder / "lightning_logs" / "version_0"


@pytest.mark.slow
def test_fit_leaves_log_config_and_checkpoint_and_says_where(run):
    _, done, log = run
    assert f"TensorBoard log: {log}" in done.stderr + done.stdout
    said = done.stderr + done.stdout
    assert f"Last checkpoint: {log / 'checkpoints' / 'last.ckpt'}" in said
    metrics = r"val/entropic_risk 0\.\d+, val/effective_rows \S+, val/rmse \S+, val/worst_loss \S+, train/loss \d"
    assert re.search(rf"Metrics: {metrics}", said)
    assert "Epoch 3" in done.stderr + done.stdout  # the progress bar
    events = EventAccumulator(str(log))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"dual/nu/weight", "dual/nu/effective_gamma", "train/loss", "lr-IncreasingMomentumSGD"} <= tags
    assert {"val/entropic_risk", "val/rmse", "val/worst_loss"} <= tags
    assert not events.Tags()["histograms"]  # of the one ν
    saved = yaml.safe_load((log / "config.yaml").read_text())
    assert saved["dual"]["class_path"] == "scent_lightning.updates.SCENT"
    assert saved["trainer"]["max_epochs"] == 4
    assert list((log / "checkpoints").iterdir()) == [log / "checkpoints" / "last.ckpt"]


@pytest.mark.slow
def test_the_commands_that_a_fit_ends_with_run_as_they_are(run, monkeypatch):
    folder, done, _ = run
    monkeypatch.chdir(folder)
    said = dict(re.findall(r"^(Predict|Train on): scent-lightning (.+)$", done.stderr + done.stdout, re.MULTILINE))
    assert said["Predict"].startswith(
        "predict --config lightning_logs/version_0/config.yaml --ckpt_path lightning_logs"
    )
    assert said["Train on"].endswith("--trainer.max_epochs 8")
    assert "Predictions: " in (made := command(folder, *shlex.split(said["Predict"]))).stdout + made.stderr
    resumed = command(folder, *shlex.split(said["Train on"]))
    assert "Epoch 7" in resumed.stdout + resumed.stderr
    assert "Epoch 3:" not in resumed.stdout + resumed.stderr


@pytest.mark.slow
def test_checkpoint_loads_without_pickle_and_elsewhere(run):
    _, _, log = run
    path = log / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["hyper_parameters"]["dual"]["class_path"] == "scent_lightning.updates.SCENT"
    task = DRORegressionTask.load_from_checkpoint(path)
    assert task.duals["nu"].update.log_alpha == "auto"
    assert task.duals["nu"].nu.item() == checkpoint["state_dict"]["duals.nu.nu"].item()


@pytest.mark.slow
def test_step_size_by_a_pilot(tmp_path):
    def fit(epochs, *arguments):
        finder = "--trainer.callbacks+=DualStepSizeFinder"
        done = command(tmp_path, "fit", "--config", CONFIG, finder, "--trainer.max_epochs", str(epochs), *arguments)
        return re.search(
            r"SCENT's step size of dual variable 'nu': (SCENT\(log_alpha=.+\))", done.stderr + done.stdout
        )[1]

    found = fit(20)
    log = tmp_path / "lightning_logs" / "version_0"
    events = EventAccumulator(str(log))
    events.Reload()
    assert "dual/nu/step_size" in events.Tags()["images"]
    last = log / "checkpoints" / "last.ckpt"
    assert repr(DRORegressionTask.load_from_checkpoint(last).duals["nu"].update) == found
    assert fit(24, "--ckpt_path", str(last)) == found


@pytest.mark.slow
def test_evaluate_predict_and_run_again_from_the_saved_config(run):
    folder, _, log = run
    arguments = ["--config", str(log / "config.yaml"), "--ckpt_path", str(log / "checkpoints" / "last.ckpt")]
    validated = command(folder, "validate", *arguments)
    risk = float(re.search(r"val/entropic_risk\s+([\d.]+)", validated.stdout)[1])
    tested = command(folder, "test", *arguments)
    assert float(re.search(r"test/entropic_risk\s+([\d.]+)", tested.stdout)[1]) == pytest.approx(risk)
    predicted = command(folder, "predict", *arguments)
    path = re.search(r"Predictions: (.+\.csv)", predicted.stdout + predicted.stderr)[1]
    with Path(path).open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["index", "prediction", "loss", "weight"]
    assert [int(row["index"]) for row in rows] == list(range(442))
    assert sum(float(row["weight"]) for row in rows) == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dual",
    [
        ["SOX", "--dual.gamma", "0.5"],
        ["BSGD"],
        ["ASGD", "--dual.alpha", "0.1"],
        ["SoftplusASGD", "--dual.alpha", "0.1", "--dual.rho", "0.001"],
        ["UMax", "--dual.alpha", "0.1", "--dual.delta", "1"],
        ["MSVR", "--dual.gamma", "0.5", "--dual.beta", "0.5"],
        ["my_duals.HalfWay", "--dual.share", "0.25"],
    ],
)
def test_any_dual_update_by_one_argument(tmp_path, dual):
    (tmp_path / "my_duals.py").write_text(
        "from scent_lightning.duals import DualUpdate\n\n"
        "class HalfWay(DualUpdate):\n"
        "    def __init__(self, share: float, max_log_weight: float | None = None):\n"
        "        super().__init__(max_log_weight)\n"
        "        self.share = share\n\n"
        "    def step_from_log_mean(self, nu, log_mean, progress=0.0):\n"
        "        return nu + self.share * (log_mean - nu)\n"
    )
    command(tmp_path, "fit", "--config", CONFIG, "--trainer.max_epochs", "1", "--dual", *dual)
    checkpoint = tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt"
    saved = torch.load(checkpoint, weights_only=True)["hyper_parameters"]["dual"]
    assert saved["class_path"].endswith(dual[0].rpartition(".")[2])
    if len(dual) > 1:
        assert saved["init_args"][dual[1].rpartition(".")[2]] == float(dual[2])


@pytest.mark.slow
def test_killed_and_resumed_run_ends_like_one_never_stopped(tmp_path):
    """SIGKILL somewhere, resume from a checkpoint: the same weights, ν and optimiser to the last bit."""
    arguments = '{"save_top_k": -1, "every_n_epochs": 10, "save_on_train_epoch_end": true}'
    keep = f'[{{"class_path": "ModelCheckpoint", "init_args": {arguments}}}]'
    common = ["--config", CONFIG, "--trainer.max_epochs", "80", "--trainer.check_val_every_n_epoch", "40"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    whole.mkdir()
    part.mkdir()
    command(whole, "fit", *common)
    process = start_command(part, "fit", *common, "--trainer.callbacks", keep)
    folder = part / "lightning_logs" / "version_0" / "checkpoints"
    deadline = time.time() + 120
    try:
        while len(list(folder.glob("epoch=*.ckpt"))) < 2 and time.time() < deadline:
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    written = sorted(folder.glob("epoch=*.ckpt"), key=lambda path: path.stat().st_mtime)
    assert len(written) < 7, "the run was over before it was killed"
    assert torch.load(written[0], weights_only=True)["epoch"] == 9
    command(part, "fit", *common, "--ckpt_path", str(written[0]))
    # The second goes on in its own folder, or begins one where that has a later state already.
    ends = (max(run.rglob("last.ckpt"), key=lambda path: path.stat().st_mtime_ns) for run in (whole, part))
    first, second = (torch.load(end, weights_only=True) for end in ends)
    # Not the epoch: where the file of the last epoch's end was due, it counts that epoch as not yet over.
    assert first["global_step"] == second["global_step"]
    assert differences(first["state_dict"], second["state_dict"]) == []
    momentum = [list(c["optimizer_states"][0]["state"].values()) for c in (first, second)]
    assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in zip(*momentum, strict=True))


@pytest.mark.slow
def test_two_processes_start_at_least_squares_of_all_rows(tmp_path):
    """By the installed program, which Lightning starts again for the second process."""
    program = [str(Path(sys.executable).with_name("scent-lightning"))]
    two = ["--trainer.strategy", "ddp", "--trainer.devices", "2", "--trainer.max_epochs", "2", "--model.lr", "1e-30"]
    cold_command(tmp_path, "fit", "--config", CONFIG, *two, program=program)
    checkpoint = tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt"
    found = torch.load(checkpoint, weights_only=True)["state_dict"]["network.weight"].flatten()
    features, target, _ = next(iter(TabularRegressionDataModule().predict_dataloader()))
    rows = torch.cat([features, torch.ones(442, 1)], dim=1).double()
    expected = torch.linalg.lstsq(rows, target.double().unsqueeze(1)).solution.flatten()[:-1]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


BAD = [
    (
        ["--dual", "Nothing"],
        "unknown dual update 'Nothing' for --dual: known are ASGD, BSGD, MSVR, SCENT, SOX, ProximalPoint, SoftplusASGD",
    ),
    (["--model", "Nothing"], "unknown task 'Nothing' for --model: known are .*DRORegressionTask"),
    (["--data", "Nothing"], "unknown data module 'Nothing' for --data: known are .*TabularRegressionDataModule"),
    (["--dual", "SOX"], "--dual SOX needs its argument.* gamma"),
    (["--dual", "SOX", "--dual.gamma", "-0.5"], r"gamma must be a number in \[0, 1\], got -0.5"),
    (["--dual.gamma", "0.5"], "--dual SCENT has no argument 'gamma'"),
    (["--model.tau", "0"], "tau must be a finite number above 0, got 0.0"),
    (["--model.tau", "warm"], "--model.tau must be float, got warm"),
    (["--data.batch_size", "500"], "batch_size 500 is larger than the data: there are 442 training rows"),
    (["--data.dataset", "nothing.csv"], "dataset 'nothing.csv' is neither a file nor one of the known data sets"),
    (["--data.dataset", "t.csv", "--data.target", "z"], "t.csv has no column z; it has: a, y"),
    (["--data.dataset", "words.csv", "--data.target", "y"], "column 'a' of words.csv is not numeric"),
    (["--data.dataset", "holes.csv", "--data.target", "y"], "missing or non-finite values in rows 1"),
    (["--data.dataset", "one.csv", "--data.target", "y"], r"one.csv has 1 row\(s\); at least 2 are needed"),
    (["--ckpt_path", "nothing.ckpt"], "ckpt_path nothing.ckpt does not exist"),
    (["--trainer.max_epochs", "many"], "--trainer.max_epochs must be int or null, got many"),
    (["--nothing", "1"], "nrecognized arguments: --nothing"),
]


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0], "y": [1.0, 0.0, 1.0]})
    frame.to_csv("t.csv", index=False)
    frame.assign(a=["red", "green", "blue"]).to_csv("words.csv", index=False)
    frame.assign(a=[1.0, None, 2.0]).to_csv("holes.csv", index=False)
    frame.head(1).to_csv("one.csv", index=False)


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_sentence_before_training(tables, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", CONFIG, "--data.batch_size", "1", *arguments])
    assert caught.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("scent-lightning: error: ")
    assert re.search(message, error), error
    assert not Path("lightning_logs").exists()


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_evaluation_needs_a_checkpoint(tables, capsys, subcommand):
    with pytest.raises(SystemExit) as caught:
        main([subcommand, "--config", CONFIG])
    assert caught.value.code == 2
    assert f"{subcommand} needs --ckpt_path: without a checkpoint it would run on untrained" in capsys.readouterr().err


def test_missing_arguments_name_the_choices(tables, capsys):
    with pytest.raises(SystemExit):
        main(["fit"])
    error = capsys.readouterr().err
    assert "--dual (one of ASGD, BSGD, MSVR" in error
    assert "--model (one of" in error


def test_divergence_is_one_sentence(tables, capsys):
    arguments = ["--trainer.logger", "false", "--trainer.enable_checkpointing", "false", "--model.lr", "1e30"]
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--config", CONFIG, *arguments, "--model.weight_step", "gradient"])
    assert caught.value.code == 1
    assert "scent-lightning: error: dual variable 'nu' with SCENT(" in capsys.readouterr().err


def test_help_documents_every_argument(capsys):
    for arguments in (["fit", "--help"], ["fit", "--dual.help", "SCENT"], ["fit", "--model.help", "DRORegressionTask"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        text = capsys.readouterr().out
        undocumented = re.findall(r"--(?:dual|model|data)\.\w+ [A-Z_{},a-z]+\s+\((?:required|type)", text)
        assert undocumented == []
    assert "temperature in the units of the loss" in text


def image_folder(folder, classes, images, size=8):
    """Noise, brighter in each further class."""
    generator = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for image in range(images):
            pixels = generator.integers(0, 128, (size, size, 3)) + 40 * number
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{image}.png")


CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def kind_of(config):
    """Task, data, and what is set of both: configurations of one kind differ in their numbers."""
    settings = yaml.safe_load(config.read_text())
    parts = [settings[part] for part in ("model", "data")]
    return tuple((part["class_path"], *sorted(part.get("init_args") or {})) for part in parts)


FIRST_OF_KIND = {kind_of(config): config for config in reversed(CONFIGS)}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_builds(config, tables, monkeypatch, data_dir):
    monkeypatch.setenv("SCENT_LIGHTNING_DATA", str(data_dir))
    arguments = ["--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]
    settings = yaml.safe_load(config.read_text())
    kind = settings["data"]["class_path"]
    if kind == "FeatureDataModule":
        for split in ("train", "val"):
            Path(split).mkdir()
            np.save(f"{split}/features.npy", np.random.default_rng(0).standard_normal((256, 8)).astype(np.float16))
            labels = np.arange(256) % 50
            several = settings["model"]["class_path"] == "MultiLabelTask"
            np.save(f"{split}/labels.npy", np.stack([labels, labels + 50], axis=1) if several else labels)
        arguments += ["--data.path", "."]
    elif kind == "RankingDataModule":
        lines = [f"{row % 3} qid:{row // 5} 1:{row % 7} 2:{row % 4}" for row in range(200)]
        Path("queries.txt").write_text("\n".join(lines))
        arguments += ["--data.path", "queries.txt"]
    elif kind == "ImageFolderDataModule":
        image_folder(Path("train"), classes=("cat", "dog"), images=64)
        arguments += ["--data.path", "."]
    elif kind == "ImbalancedImageDataModule":
        for split in ("train", "test"):
            image_folder(Path(split), classes=("cat", "dog"), images=64)
        arguments += ["--data.path", ".", "--data.dataset", "folder", "--data.removed_positives", "0"]
        arguments += ["--data.positive_classes", "[dog]"]
        model = settings["model"]["init_args"]
        if "backbone_checkpoint" in model:
            torch.save(SmallImageResNet(**model["network"]["init_args"]).state_dict(), model["backbone_checkpoint"])
    elif config.stem == "clip_emoji":
        unpack(data_dir / "emoji" / "emoji.tar.gz", Path())
        arguments += ["--data.path", "emoji.tsv"]
    elif kind == "ImageTextDataModule":
        # Pairs at hand in place of the data set, and one process without a GPU.
        arguments += ["--data.source", "shapes", "--data.rows", "16", "--data.val_rows", "4", "--data.batch_size", "4"]
        arguments += ["--data.path", "null", "--data.val_path", "null", "--data.split_column", "null"]
        arguments += ["--data.num_workers", "0", "--trainer.devices", "1", "--trainer.strategy", "auto"]
        arguments += ["--trainer.precision", "32-true"]
    if config.stem == "clip_zero_shot":  # which only evaluates: tests/callbacks/test_zero_shot_benchmark.py
        assert kind_of(config) not in map(kind_of, set(CONFIGS) - {config})
        without_running(*arguments, config=config)
    elif config in FIRST_OF_KIND.values():
        main(["fit", "--config", str(config), "--trainer.fast_dev_run", "1", *arguments])
    else:
        without_running(*arguments, config=config)


def test_two_runs_without_a_logger_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ["--trainer.logger", "false", "--trainer.max_epochs", "1", "--trainer.enable_progress_bar", "false"]
    for tau in ("1.0", "2.0"):
        main(["fit", "--config", CONFIG, *short, "--model.tau", tau])
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]["init_args"]["tau"] == 2.0


@pytest.mark.slow
def test_two_stages_of_partial_auc(tmp_path):
    for split, images in (("train", 40), ("test", 20)):
        image_folder(tmp_path / "images" / split, ("cat", "dog", "horse", "ship"), images)
    data = ["--data.path", "images", "--data.removed_positives", "0.5", "--trainer.log_every_n_steps", "1"]
    data += ["--data.positive_classes", "[horse, ship]"]
    short = ["--trainer.max_epochs", "2", "--data.batch_size", "16", "--data.positives_per_batch", "8"]
    model = ["--model.network.init_args.width", "4"]
    first = str(ROOT / "configs" / "pauc_cifar10_small_pretrain.yaml")
    second = str(ROOT / "configs" / "pauc_cifar10_small.yaml")
    command(tmp_path, "fit", "--config", first, *data, *short, *model)
    pretrained = tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt"
    backbone = ["--model.backbone_checkpoint", str(pretrained)]
    dual = ["--dual", "SOX", "--dual.gamma", "0.7"]
    command(tmp_path, "fit", "--config", second, *data, *short, *model, *backbone, *dual)
    log = tmp_path / "lightning_logs" / "version_1"
    events = EventAccumulator(str(log))
    events.Reload()
    tags = events.Tags()
    areas = {"partial_auc", "partial_auc_standardized", "two_way_partial_auc", "auroc", "objective"}
    assert {f"val/{name}" for name in areas} | {"train/loss", "dual/nu/mean", "dual/nu/gamma"} <= set(tags["scalars"])
    assert "val/roc_curve" in tags["images"]
    assert Image.open(log / "roc_curve_val.png").size[0] > 300
    # Half of the 80 positive rows are gone; 40 of 120 rows are anchors, and one epoch visits them all.
    assert events.Scalars("dual/nu/visited")[-1].value == pytest.approx(40 / 120)
    last = str(log / "checkpoints" / "last.ckpt")
    weights = [torch.load(path, weights_only=True)["state_dict"] for path in (pretrained, last)]
    assert torch.equal(*(state["network.blocks.0.conv1.weight"] for state in weights))
    assert not torch.equal(*(state["network.classifier.weight"] for state in weights))
    config = str(log / "config.yaml")
    found = command(tmp_path, "test", "--config", config, "--ckpt_path", last).stdout
    for name in areas:
        assert f"test/{name}" in found
    command(tmp_path, "predict", "--config", config, "--ckpt_path", last)
    (written,) = tmp_path.glob("lightning_logs/version_*/predictions.csv")
    table = pd.read_csv(written)
    assert table["index"].tolist() == list(range(80))
    assert table["label"].tolist() == [0] * 40 + [1] * 40
    assert table["score"].between(0, 1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.tau", "0"], "tau must be a finite number above 0, got 0.0"),
        (["--model.surrogate", "exp"], "surrogate"),
        (["--data.positive_classes", "[bird]"], "positive_classes has an unknown class 'bird'"),
        (
            ["--data.positive_classes", "null"],
            "positive_classes must say which classes of . are positive: cat, dog (on",
        ),
        (["--data.removed_positives", "1.5"], "removed_positives must be a number in [0, 1), got 1.5"),
        (["--data.batch_size", "512"], "is more than the 16 positive rows there are"),
        (["--model.backbone_checkpoint", "other.pt"], "backbone_checkpoint other.pt does not match the network: it"),
    ],
)
def test_wrong_settings_of_partial_auc_are_one_sentence(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        image_folder(tmp_path / split, ("cat", "dog"), 80)
    torch.save(SmallImageResNet(width=16).state_dict(), "pauc_cifar10_small_pretrained.ckpt")
    torch.save({"a.weight": torch.zeros(1)}, "other.pt")
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                "fit",
                "--config",
                str(ROOT / "configs" / "pauc_cifar10_small.yaml"),
                "--data.path",
                ".",
                "--data.batch_size",
                "16",
                "--data.positive_classes",
                "[dog]",
                "--trainer.logger",
                "false",
                "--trainer.enable_progress_bar",
                "false",
                "--trainer.accelerator",
                "cpu",
                *arguments,
            ]
        )
    assert stopped.value.code == 2
    error = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(error) == 1
    assert message in error[0]


def without_running(*arguments, config=CONFIG) -> ScentCLI:
    return ScentCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        run=False,
        args=["--config", str(config), *arguments],
    )


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ([], AtomicCheckpointIO),
        (["--trainer.plugins", "LightningEnvironment"], AtomicCheckpointIO),
        (["--trainer.plugins", "TorchCheckpointIO"], TorchCheckpointIO),
        (["--trainer.plugins", '[{"class_path": "AsyncCheckpointIO"}]'], AsyncCheckpointIO),
    ],
)
def test_checkpoints_are_atomic_unless_the_user_has_another_way(tables, arguments, kind):
    assert type(without_running(*arguments).trainer.strategy.checkpoint_io) is kind


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ("ModelCheckpoint", ["ModelCheckpoint", "LastCheckpoint"]),
        ("ModelCheckpoint, init_args: {monitor: train/loss, save_last: false}", ["ModelCheckpoint", "LastCheckpoint"]),
        ("ModelCheckpoint, init_args: {every_n_train_steps: 3}", ["ModelCheckpoint", "LastCheckpoint"]),
        ("ModelCheckpoint, init_args: {save_last: true}", ["ModelCheckpoint"]),
        ("ModelCheckpoint, init_args: {save_last: link}", ["ModelCheckpoint"]),
        ("ModelCheckpoint, init_args: {filename: last}", ["ModelCheckpoint"]),
        ("scent_lightning.callbacks.LastCheckpoint, init_args: {at_most_every_s: 9}", ["LastCheckpoint"]),
    ],
)
def test_there_is_a_last_checkpoint_beside_the_users(tables, given, kinds):
    cli = without_running("--trainer.callbacks", f"[{{class_path: {given}}}]")
    assert [type(callback).__name__ for callback in cli.trainer.checkpoint_callbacks] == kinds


def test_users_progress_bar_replaces_the_default_one(tables):
    cli = without_running("--trainer.callbacks", "[{class_path: TQDMProgressBar, init_args: {refresh_rate: 7}}]")
    assert cli.trainer.progress_bar_callback.refresh_rate == 7


@pytest.mark.parametrize(("every", "files"), [(10, 0), (2, 1), (1, 1)])
def test_a_monitor_leaves_a_state_to_go_on_from(tables, tmp_path, every, files):
    """Lightning writes the best one after validation: where none was, there is none."""
    folder = tmp_path / "kept"
    callback = f"{{class_path: ModelCheckpoint, init_args: {{dirpath: {folder}, monitor: train/loss, mode: min}}}}"
    arguments = ["--config", CONFIG, "--trainer.callbacks", f"[{callback}]", "--trainer.max_epochs", "3"]
    arguments += ["--trainer.check_val_every_n_epoch", str(every)]
    main(["fit", *arguments, "--trainer.default_root_dir", str(tmp_path), "--trainer.enable_progress_bar", "false"])
    assert len(list(folder.glob("epoch=*.ckpt"))) == files
    assert len(list(tmp_path.rglob("last.ckpt"))) == 1


def test_all_that_spawned_processes_are_sent_can_be(tables):
    """The Trainer's callbacks hold the parser, which writes the configuration."""
    cli = without_running("--trainer.strategy", "ddp_spawn", "--trainer.accelerator", "cpu", "--trainer.devices", "2")
    for part in (cli.parser, cli.model, cli.datamodule, cli.trainer):
        assert type(pickle.loads(pickle.dumps(part))) is type(part)


@pytest.mark.slow
def test_spawned_processes(tmp_path):
    spawned = ["--trainer.strategy", "ddp_spawn", "--trainer.accelerator", "cpu", "--trainer.devices", "2"]
    command(tmp_path, "fit", "--config", CONFIG, "--trainer.max_epochs", "1", *spawned)
    assert len(list(tmp_path.rglob("last.ckpt"))) == 1


def test_predictions_of_a_new_file_are_those_of_the_training_file(tmp_path, monkeypatch):
    """Another selection of rows, columns in another order, no target, one row: the training run's scaling."""
    monkeypatch.chdir(tmp_path)
    table = load_diabetes(as_frame=True, scaled=False).frame
    table.to_csv("all.csv", index=False)
    settings = ["--model", "DRORegressionTask", "--dual", "BSGD", "--data", "TabularRegressionDataModule"]
    settings += ["--data.target", "target", "--trainer.logger", "false", "--trainer.accelerator", "cpu"]
    settings += ["--trainer.enable_progress_bar", "false", "--model.tau", "1000"]
    run = ["--trainer.max_epochs", "1", "--trainer.callbacks", "ModelCheckpoint"]
    run += ["--trainer.callbacks.dirpath", "kept", "--trainer.callbacks.filename", "a"]
    main(["fit", *settings, *run, "--data.dataset", "all.csv"])

    def predictions(frame):
        frame.to_csv("new.csv", index=False)
        main(["predict", *settings, "--data.dataset", "new.csv", "--ckpt_path", "kept/a.ckpt"])
        return pd.read_csv("predictions.csv")

    expected = predictions(table)["prediction"].to_numpy()
    older = table[table["age"] > 50]
    np.testing.assert_allclose(predictions(older)["prediction"], expected[older.index], rtol=1e-5)
    bare = table.drop(columns=["target"])[table.columns[-2::-1]][5:6]
    found = predictions(bare)
    assert list(found.columns) == ["index", "prediction"]
    np.testing.assert_allclose(found["prediction"], expected[5:6], rtol=1e-5)


def test_a_logger_that_is_interrupted_prints_no_traceback(tmp_path, monkeypatch, capfd):
    """As by the death of a loader process, which is told of while a message is written."""
    (tmp_path / "interrupted.py").write_text(
        """
import logging
import lightning as L

class Interrupted(L.Callback):
    def on_train_start(self, trainer, pl_module):
        handler = logging.StreamHandler(self)
        logging.getLogger("interrupted").addHandler(handler)
        logging.getLogger("interrupted").warning("a message")
        logging.getLogger("interrupted").removeHandler(handler)

    def write(self, text):
        raise RuntimeError("a loader process died")

    def flush(self):
        pass
"""
    )
    monkeypatch.chdir(tmp_path)
    before = logging.raiseExceptions
    arguments = ["fit", "--config", str(ROOT / "configs" / "dro_diabetes.yaml"), "--trainer.max_steps=1"]
    main([*arguments, "--trainer.callbacks+=interrupted.Interrupted", "--trainer.enable_progress_bar=false"])
    assert "a loader process died" not in capfd.readouterr().err
    assert logging.raiseExceptions == before

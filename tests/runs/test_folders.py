"""Where a run is: what it is called, that it goes on in its own folder, and that evaluation makes no new one."""

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scent_lightning.callbacks.settings_log import SettingsLog
from scent_lightning.cli import main
from scent_lightning.errors import InputError
from scent_lightning.runs.folders import check_name, name_of_settings, run_folder
from scent_lightning.runs.place import EvaluationLogger, place_of
from scent_lightning.runs.reading import read_run
from tests.conftest import ROOT
from tests.helpers import under_two_trainers
from tests.kill_and_resume import differences

CONFIG = str(ROOT / "configs" / "dro_diabetes.yaml")
QUIET = ["--trainer.enable_progress_bar", "false"]
EACH_EPOCH = "--trainer.callbacks+=scent_lightning.callbacks.LastCheckpoint"
SHORT = [*QUIET, "--trainer.log_every_n_steps", "5", "--trainer.check_val_every_n_epoch", "1", EACH_EPOCH]
SHORT += ["--trainer.callbacks.at_most_every_s", "0"]
STOPS = '''
import lightning as L


class Stops(L.Callback):
    """As Ctrl-C in the third epoch, after something was logged that the last checkpoint does not know of."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 33:
            raise KeyboardInterrupt
'''


def fit(*arguments, config=CONFIG, epochs=4):
    main(["fit", "--config", str(config), *SHORT, "--trainer.max_epochs", str(epochs), *map(str, arguments)])


def folders(root="lightning_logs"):
    return sorted(path.parent.relative_to(root).as_posix() for path in Path(root).rglob("config.yaml"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that was never stopped, and one that was stopped and has gone on; in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        Path("stops.py").write_text(STOPS)
        fit("--name", "whole")
        with pytest.raises(SystemExit):
            fit("--name", "part", "--trainer.callbacks+=stops.Stops")
        stopped = read_run(Path("lightning_logs/part/version_0"))
        fit("--name", "part", "--ckpt_path", "last")
        yield Path.cwd(), stopped


@pytest.fixture
def here(runs, tmp_path, monkeypatch):
    """A copy of them to work in."""
    shutil.copytree(runs[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_goes_on_in_its_folder_as_if_it_had_never_stopped(here, runs):
    assert folders() == ["part/version_0", "whole/version_0"]
    first, second = (
        torch.load(f"lightning_logs/{name}/version_0/checkpoints/last.ckpt", weights_only=True)
        for name in ("whole", "part")
    )
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert differences(first[key], second[key]) == []
    assert [path.name for path in here.rglob("part/**/*.ckpt")] == ["last.ckpt"]


def test_its_log_has_no_step_twice_and_none_of_what_was_lost(here, runs):
    stopped = runs[1]
    assert stopped.status == "unfinished"
    assert stopped.curves["train/loss"][0].tolist() == [4, 9, 14, 19, 24, 29]
    whole, part = (read_run(Path(f"lightning_logs/{name}/version_0")) for name in ("whole", "part"))
    assert part.status == whole.status == "finished"
    assert whole.curves.keys() == part.curves.keys()
    for tag, (steps, values) in whole.curves.items():
        assert steps.tolist() == part.curves[tag][0].tolist(), tag
        assert values.tolist() == part.curves[tag][1].tolist(), tag
    # TensorBoard itself sees it so, too.
    seen = EventAccumulator("lightning_logs/part/version_0")
    seen.Reload()
    for tag in ("train/loss", "val/entropic_risk"):
        assert [event.step for event in seen.Scalars(tag)] == whole.curves[tag][0].tolist()


def test_the_configuration_of_its_beginning_stays(here):
    folder = Path("lightning_logs/part/version_0")
    assert sorted(path.name for path in folder.glob("*.yaml")) == [
        "config.yaml",
        "config_from_step_28.yaml",
        "hparams.yaml",
    ]
    first, second = (
        yaml.safe_load((folder / name).read_text()) for name in ("config.yaml", "config_from_step_28.yaml")
    )
    assert first["ckpt_path"] is None
    assert second["ckpt_path"].endswith("last.ckpt")
    assert first["name"] == second["name"] == "part"


def test_evaluation_writes_beside_the_checkpoint(here, capsys, caplog):
    run = Path("lightning_logs/part/version_0")
    common = ["--config", str(run / "config.yaml"), *QUIET]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    main(["predict", *common, "--ckpt_path", "last", "--name", "part"])
    main(["validate", *common, "--ckpt_path", str(run / "checkpoints" / "last.ckpt")])
    main(["test", *common, "--ckpt_path", str((run / "checkpoints" / "last.ckpt").absolute())])
    assert folders() == ["part/version_0", "whole/version_0"]
    assert {path: path.read_bytes() for path in before} == before
    new = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()} - {
        path.relative_to(run).as_posix() for path in before
    }
    assert {re.sub(r"events\..*", "events", name) for name in new} == {
        "predictions.csv",
        "metrics_validate.json",
        "metrics_test.json",
        "config_predict.yaml",
        "config_validate.yaml",
        "config_test.yaml",
        "validate/events",
        "test/events",
    }
    assert len(pd.read_csv(run / "predictions.csv")) == 442
    last = read_run(run).curves["val/entropic_risk"][1][-1]
    metrics = json.loads((run / "metrics_validate.json").read_text())
    assert metrics["val/entropic_risk"] == pytest.approx(last, rel=1e-6)
    assert f"Metrics: {here}/lightning_logs/part/version_0/metrics_test.json" in caplog.text + capsys.readouterr().err


def test_a_run_that_was_killed_at_its_very_end_is_finished_by_going_on(tmp_path, monkeypatch):
    """Its last checkpoint is that of its end, and leaves no epoch to train."""
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as killed:
        killed.setattr(SettingsLog, "on_fit_end", lambda *_: None)
        fit()
    folder = tmp_path / "lightning_logs" / "version_0"
    assert read_run(folder).status == "unfinished"
    fit("--ckpt_path", str(folder / "checkpoints" / "last.ckpt"))
    assert read_run(folder).status == "finished"
    assert folders() == ["version_0"]


def test_an_older_checkpoint_or_another_name_begins_a_new_run(here):
    last = Path("lightning_logs/part/version_0/checkpoints/last.ckpt")
    shutil.copy("lightning_logs/whole/version_0/checkpoints/last.ckpt", last.with_name("older.ckpt"))
    state = torch.load(last.with_name("older.ckpt"), weights_only=True)
    state["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] -= 28
    torch.save(state, last.with_name("older.ckpt"))
    trainer = {}
    assert place_of("fit", trainer, str(last), None, False).goes_on is not None
    assert place_of("fit", trainer, str(last.with_name("older.ckpt")), None, False).goes_on is None
    assert place_of("fit", trainer, str(last), "part", False).goes_on is not None
    assert place_of("fit", trainer, str(last), "another", False).goes_on is None
    assert place_of("fit", trainer, str(last), "part,max_epochs=8", True).goes_on is not None
    last.write_bytes(last.read_bytes()[:1000])  # then the older one is all there is
    assert place_of("fit", trainer, str(last.with_name("older.ckpt")), None, False).goes_on is not None


@pytest.mark.parametrize("command", ["fit", "validate", "predict"])
def test_a_checkpoint_outside_of_a_run_is_of_none(here, command):
    Path("models/checkpoints").mkdir(parents=True)
    for copy in ("copied.ckpt", "models/checkpoints/copied.ckpt"):
        shutil.copy("lightning_logs/whole/version_0/checkpoints/last.ckpt", copy)
        place = place_of(command, {}, copy, None, False)
        if command == "fit":
            logger = place.trainer["logger"]
            assert Path(logger.log_dir) == here / "lightning_logs" / "version_0"
            assert place.config_file == "config.yaml"
        else:
            assert place.trainer == {"logger": False}


def test_where_the_user_says_otherwise_nothing_goes_to_the_checkpoints_run(here, tmp_path):
    last = "lightning_logs/whole/version_0/checkpoints/last.ckpt"
    for own in (False, TensorBoardLogger(tmp_path), {"class_path": "CSVLogger"}):
        for command in ("fit", "test"):
            assert place_of(command, {"logger": own}, last, None, False).trainer == {}
    for command in ("fit", "validate"):
        elsewhere = place_of(command, {"default_root_dir": "another"}, last, None, False)
        assert elsewhere.goes_on is None
        assert "default_root_dir" not in elsewhere.trainer
    inside = place_of("validate", {"default_root_dir": str(here)}, last, None, False)
    assert isinstance(inside.trainer["logger"], EvaluationLogger)
    with pytest.raises(InputError, match="name mine is for"):
        place_of("fit", {"logger": False}, None, "mine", False)


def test_a_folder_that_was_moved_keeps_one_last_checkpoint(here):
    shutil.move("lightning_logs/part/version_0", "moved")
    arguments = ["--config", "moved/config.yaml", "--name", "null", "--trainer.max_epochs", "5"]
    main(["fit", *arguments, "--ckpt_path", "moved/checkpoints/last.ckpt"])
    assert [path.name for path in Path("moved").rglob("*.ckpt")] == ["last.ckpt"]
    assert read_run(Path("moved")).curves["val/rmse"][0].tolist() == [13, 27, 41, 55, 69]
    assert folders() == ["whole/version_0"]


def test_the_commands_at_the_end_of_a_fit_that_went_on(here, caplog, capsys):
    fit("--ckpt_path", "last", "--name", "auto", epochs=5)
    said = caplog.text + capsys.readouterr().err
    config = "lightning_logs/part/version_0/config_from_step_56.yaml"
    assert f"Predict: scent-lightning predict --config {config} --ckpt_path lightning_logs/part/version_0/ch" in said
    assert f"Train on: scent-lightning fit --config {config} --ckpt_path" in said


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--config", "configs/dro_diabetes.yaml"], "dro_diabetes"),
        (
            ["--config=dro_diabetes", "--model.tau", "2", "--dual", "SOX", "--dual.gamma", "0.5"],
            "dro_diabetes,tau=2,SOX,gamma=0.5",
        ),
        (["--config", "a/version_0/config.yaml", "--seed_everything=3"], "seed=3"),
        (["--config", "a/version_0/config.yaml"], "config"),
        (["-c", "x", "--trainer.max_epochs", "5", "--trainer.logger", "true", "--ckpt_path", "last"], "x,max_epochs=5"),
        (["--data.path", "/data/my set/", "--model.lr", "-1e-3", "--data.num_workers", "4"], "path=my_set,lr=-1e-3"),
        (["--model", "my.own.Task", "--trainer.callbacks+=RichProgressBar", "--trainer.fast_dev_run"], "Task"),
        (["--model.ks", "[1, 5]"], "ks=1,5"),
        ([], "run"),
    ],
)
def test_a_name_by_what_was_set(arguments, name):
    assert name_of_settings(arguments) == name


def test_a_long_name_is_cut_and_stays_different():
    names = {name_of_settings(["--data.path", "x" * 200 + end]) for end in "ab"}
    assert len(names) == 2
    assert all(len(name) == 120 for name in names)


@pytest.mark.parametrize("name", ["", " ", "a/b", "a\\b", "..", ".hidden", "-x", "version_3", "a:b", "x" * 256, "end "])
def test_a_name_that_no_folder_can_have_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^name "):
        check_name(name)
    if name in ("", "a/b", "version_3"):
        with pytest.raises(SystemExit) as stopped:
            main(["fit", "--config", CONFIG, f"--name={name}"])
        assert stopped.value.code == 2
        assert capsys.readouterr().err.startswith("scent-lightning: error: name ")
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["first", "tau=0.2,SCENT", "Größe 2"])
def test_names_that_folders_can_have(name):
    assert check_name(name) == name


def test_the_folder_of_a_run_has_a_log(tmp_path):
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert run_folder(last) is None
    (tmp_path / "events.out.tfevents.1").touch()
    assert run_folder(last) == tmp_path
    assert run_folder(tmp_path / "last.ckpt") is None


def _in_two_processes(rank, folder):
    """Fit, go on, and predict, as each of two processes of a run does."""
    os.chdir(folder)
    two = ["--trainer.strategy", "ddp", "--trainer.num_nodes", "2", "--trainer.devices", "1"]
    two += ["--trainer.plugins", "LightningEnvironment", "--trainer.accelerator", "cpu"]
    fit(*two, "--name", "auto", epochs=1)
    fit(*two, "--ckpt_path", "last", epochs=2)
    main(["predict", "--config", CONFIG, *QUIET, *two, "--ckpt_path", "last"])


@pytest.mark.slow
def test_processes_agree_on_the_folder(tmp_path):
    under_two_trainers(partial(_in_two_processes, folder=tmp_path))
    (run,) = (path.parent for path in tmp_path.rglob("config.yaml"))
    assert run.relative_to(tmp_path) == Path("lightning_logs/dro_diabetes,max_epochs=1/version_0")
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["last.ckpt"]
    assert {path.name for path in run.glob("*.csv")} == {"predictions_rank0.csv", "predictions_rank1.csv"}
    assert read_run(run).curves["val/rmse"][0].tolist() == [6, 13]

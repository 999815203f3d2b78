"""Runs side by side, read from their configurations and their TensorBoard logs alone."""

import csv
import dataclasses
import shutil
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from scent_lightning.callbacks.settings_log import SettingsLog
from scent_lightning.cli import main
from scent_lightning.errors import InputError
from scent_lightning.runs.comparison import compare, differing, in_words
from scent_lightning.runs.reading import find_runs, read_run
from scent_lightning.runs.settings import class_in_words, of_task_and_data, settings_of
from tests.helpers import SoftmaxData, SoftmaxTask, quiet_trainer

SCENT = {"class_path": "scent_lightning.updates.SCENT", "init_args": {"log_alpha": "auto", "schedule": "constant"}}
SOX = {"class_path": "scent_lightning.updates.SOX", "init_args": {"gamma": 0.5, "final": None}}


def config(seed=0, dual=SCENT, **model):
    return {
        "seed_everything": seed,
        "trainer": {"max_epochs": 3, "logger": None, "default_root_dir": f"/somewhere/{seed}", "callbacks": None},
        "model": {"class_path": "scent_lightning.tasks.DRORegressionTask", "init_args": {"tau": 1.0, **model}},
        "data": {"class_path": "my.TableDataModule", "init_args": {"dataset": "rows.csv", "batch_size": 8}},
        "dual": dual,
        "ckpt_path": None,
        "name": f"run{seed}",
    }


def make_run(folder, values, tag="val/risk", **settings):
    """A log with a value at each tenth step, as TensorBoard has it from anywhere."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config(**settings)))
    with SummaryWriter(str(folder)) as writer:
        for step, value in enumerate(values):
            writer.add_scalar(tag, value, 10 * step + 9)
    return folder


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """Two methods with three seeds each, and one of another τ."""
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        make_run(tmp_path / "logs" / f"scent{seed}", [4.0, 2.0 + seed, 1.0 + seed / 10], seed=seed)
        make_run(tmp_path / "logs" / "deeper" / f"sox{seed}", [4.0, 0.5, 3.0 + seed], seed=seed, dual=SOX)
    make_run(tmp_path / "logs" / "one", [5.0, 4.5], tau=0.2)
    return tmp_path / "logs"


def told(capsys, *arguments) -> str:
    capsys.readouterr()
    main(["compare", *map(str, arguments)])
    return capsys.readouterr().out


def test_runs_that_differ_by_their_seed_are_one_row(logs, capsys):
    head, _, *rows = told(capsys, logs).strip().splitlines()
    assert head.split() == ["dual", "tau", "runs", "val/risk", "last", "best", "(min)"]
    assert [row.split() for row in rows] == [
        ["SCENT(log_alpha=auto)", "1.0", "3", "1.10", "±", "0.10", "1.10", "±", "0.10"],
        ["SOX(gamma=0.5)", "1.0", "3", "4.0", "±", "1.0", "0.5", "±", "0"],
        ["SCENT(log_alpha=auto)", "0.2", "1", "4.5", "4.5"],
    ]


def test_csv_and_figure(logs, tmp_path, capsys):
    files = tmp_path / "out" / "table.csv", tmp_path / "out" / "picture.png"
    said = told(capsys, logs, "--csv", files[0], "--figure", files[1])
    assert f"Table: {files[0]}\nFigure: {files[1]}" in said
    with files[0].open() as file:
        rows = list(csv.DictReader(file))
    assert [row["dual"] for row in rows] == ["SCENT(log_alpha=auto)", "SOX(gamma=0.5)", "SCENT(log_alpha=auto)"]
    assert float(rows[0]["last_mean"]) == pytest.approx(1.1)
    assert float(rows[0]["last_std"]) == pytest.approx(0.1)
    assert rows[0]["seeds"] == "0 1 2"
    assert rows[2]["last_std"] == "nan"
    assert len(rows[1]["folders"].split()) == 3
    assert Image.open(files[1]).size[0] > 1000
    text = files[1].with_suffix(".svg").read_text()
    assert "SOX(gamma=0.5), tau 1.0" in text
    assert "val/risk" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["logs", "--metric", "val/risky"], "metric val/risky is not in the log of any run; there is val/risk"),
        (["empty"], "there is no run below empty"),
        (["logs", "--figure", "a.txt"], "figure must end in .png, .pdf or .svg, got a.txt"),
    ],
)
def test_what_cannot_be_compared_is_told(logs, tmp_path, capsys, arguments, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as stopped:
        told(capsys, *arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"scent-lightning: error: {message}")
    assert error.count("\n") == 1


def test_what_cannot_be_read_is_named_and_the_rest_compared(logs, capsys):
    for number, text in enumerate(["[", "trainer: {}", "just text"]):
        make_run(logs / f"bad{number}", [1.0])
        (logs / f"bad{number}" / "config.yaml").write_text(text)
    make_run(logs / "cut", [1.0], seed=7)
    (event,) = (logs / "cut").glob("events*")
    event.write_bytes(event.read_bytes()[:30])
    make_run(logs / "other", [1.0], tag="val/accuracy", seed=8)
    said = told(capsys, logs, "--metric", "val/risk")
    assert "passed over: logs/bad0/config.yaml cannot be read: " in said.replace(f"{logs.parent}/", "")
    assert said.count("is not the configuration of a run: it has no model") == 2
    assert "2 runs have not logged val/risk: " in said
    assert said.splitlines()[2].split()[2] == "3"  # the runs that can be read


def test_runs_of_several_tasks_have_a_table_each(logs, capsys):
    make_run(logs / "other", [0.5, 0.75], tag="val/accuracy")
    said = told(capsys, logs)
    assert "val/accuracy last" in said
    assert "best (max)" in said
    assert "val/risk last" in said
    assert "val/accuracy last" not in told(capsys, logs, "--metric", "val/risk")


def fit(folder, seed, fails=False):
    """A run of the Trainer with what the command line adds to one."""
    task, data = SoftmaxTask(24), SoftmaxData()
    task.main_metric = "val_loss", "max"
    callbacks: list[L.Callback] = [SettingsLog(of_task_and_data(config(seed)))]
    if fails:
        task.validation_step = lambda batch, batch_idx: 1 / 0
    logger = TensorBoardLogger(folder, "", f"seed{seed}", default_hp_metric=False)
    trainer = quiet_trainer(max_epochs=2, logger=logger, callbacks=callbacks, num_sanity_val_steps=0)
    try:
        trainer.fit(task, datamodule=data)
    except ZeroDivisionError:
        logger.finalize("failed")
    Path(logger.log_dir, "config.yaml").write_text(yaml.safe_dump(config(seed)))


def test_a_run_says_what_it_is_compared_by_and_how_it_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        fit(tmp_path, seed, fails=seed == 2)
    runs = [read_run(folder) for folder in find_runs([tmp_path])]
    assert [run.status for run in runs] == ["finished", "finished", "failed"]
    assert all(run.main == ("val_loss", "max") for run in runs)
    (comparison,) = compare(runs[:2])
    assert (comparison.metric, comparison.better) == ("val_loss", "max")
    shorter = dataclasses.replace(runs[0], curves={"train/loss": runs[0].curves["val_loss"]})
    assert shorter.metric() == ("train/loss", "min")  # as without a validation
    assert dataclasses.replace(runs[0], curves={}).metric() is None
    said = told(capsys, ".")
    assert "1 run has failed and is not counted: seed2" in said
    assert said.splitlines()[2].split()[0] == "2"
    assert "1 run has logged nothing to compare by: seed2" in told(capsys, ".", "--all")


def test_a_run_with_lightnings_own_logger_is_compared_by_its_validation(tmp_path):
    trainer = quiet_trainer(max_epochs=1, logger=TensorBoardLogger(tmp_path, "", "a"))
    trainer.fit(SoftmaxTask(24), datamodule=SoftmaxData())
    (tmp_path / "a" / "config.yaml").write_text(yaml.safe_dump(config()))
    run = read_run(tmp_path / "a")
    assert "hp_metric" in run.curves
    assert run.metric() == ("val_loss", "min")
    assert run.status == "finished"


def test_the_hparams_page_shows_readable_settings(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    fit(tmp_path, 3)
    events = EventAccumulator(str(tmp_path / "seed3"))
    events.Reload()
    content = events.PluginTagToContent(metadata.PLUGIN_NAME)
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    shown = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    assert shown == {
        "seed": 3,
        "task": "DRORegressionTask",
        "tau": 1.0,
        "data": "TableDataModule(dataset=rows.csv)",
        "data.batch_size": 8,
        "dual": "SCENT(log_alpha=auto)",
        "max_epochs": 3,
    }
    assert "hp_metric" not in events.Tags()["scalars"]
    (metric,) = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG]).metric_infos
    assert metric.name.tag in events.Tags()["scalars"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (SCENT, "SCENT(log_alpha=auto)"),
        (SOX, "SOX(gamma=0.5)"),
        ({"class_path": "a.BSGD"}, "BSGD"),
        (
            {"class_path": "a.Net", "init_args": {"inner": SOX, "widths": [3, 4]}},
            "Net(inner=SOX(gamma=0.5), widths=[3, 4])",
        ),
        (
            {"class_path": "a.B", "init_args": {"schedule": "cosine"}, "dict_kwargs": {"k": True}},
            "B(schedule=cosine, k=True)",
        ),
    ],
)
def test_a_class_in_words(value, words):
    assert class_in_words(value) == words


def test_where_a_run_is_makes_no_difference():
    first, second = settings_of(config(0)), settings_of({**config(0), "name": "other", "ckpt_path": "last.ckpt"})
    assert differing([first, second, settings_of(config(1))]) == []
    assert differing([first, settings_of(config(0, tau=2.0, lr=0.1))]) == ["tau", "lr"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0.5], "0.5"),
        ([1, 1], "1 ± 0"),
        ([100.0, 150.0], "125 ± 35"),
        ([1e-5, 3e-5], "0.000020 ± 0.000014"),
        ([np.nan, 1], "nan"),
    ],
)
def test_numbers_have_the_digits_that_say_something(values, words):
    assert in_words(np.array(values, float)) == words


def test_a_run_is_what_it_was_set_to_last(tmp_path):
    folder = make_run(tmp_path / "a", [1.0])
    for step, epochs in ((50, 9), (8, 5)):
        changed = config()
        changed["trainer"]["max_epochs"] = epochs
        (folder / f"config_from_step_{step}.yaml").write_text(yaml.safe_dump(changed))
    shutil.copy(folder / "config.yaml", folder / "config_predict.yaml")
    assert read_run(folder).settings["trainer.max_epochs"] == 9


def test_a_folder_without_a_log_is_no_run(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {}")
    assert find_runs([tmp_path]) == []
    with pytest.raises(InputError, match="there is no folder"):
        find_runs([tmp_path / "config.yaml"])

"""What the words for a checkpoint stand for: a file that is named, or one sentence; never untrained weights."""

import os
import re
import shutil

import pandas as pd
import pytest
import torch

from scent_lightning.cli import main
from tests.conftest import ROOT

CONFIG = ["--config", str(ROOT / "configs" / "dro_diabetes.yaml"), "--trainer.enable_progress_bar", "false"]
BEST = ["--trainer.callbacks", "ModelCheckpoint", "--trainer.callbacks.monitor", "val/rmse"]
BEST += ["--trainer.check_val_every_n_epoch", "1", "--trainer.callbacks.filename", "kept"]


def fit(*arguments):
    main(["fit", *CONFIG, "--trainer.max_epochs", "2", *arguments])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs with a log: the first keeps its best checkpoint, and the second is longer."""
    folder = tmp_path_factory.mktemp("runs")
    fit("--trainer.default_root_dir", str(folder), *BEST)
    fit("--trainer.default_root_dir", str(folder), "--trainer.max_epochs", "3")
    return folder


@pytest.fixture
def here(runs, tmp_path, monkeypatch):
    """A working folder with these runs."""
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys, caplog) -> str:
    return capsys.readouterr().err + caplog.text


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("scent-lightning: error: "))
    return line.removeprefix("scent-lightning: error: ")


def predictions(*arguments):
    main(["predict", *CONFIG, "--trainer.logger", "false", *arguments])
    return pd.read_csv("predictions.csv")["prediction"]


LAST = "lightning_logs/version_1/checkpoints/last.ckpt"


def test_last_is_the_newest_run_and_is_named(here, capsys, caplog):
    word = predictions("--ckpt_path", "last")
    assert f"Checkpoint last: {LAST}" in told(capsys, caplog)
    pd.testing.assert_series_equal(word, predictions("--ckpt_path", LAST))


def test_an_older_run_that_was_gone_on_with_is_the_newest(here, capsys, caplog):
    first = here / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt"
    later = (here / LAST).stat().st_mtime + 10
    os.utime(first, (later, later))
    main(["validate", *CONFIG, "--trainer.logger", "false", "--ckpt_path", "last"])
    assert "Checkpoint last: lightning_logs/version_0/" in told(capsys, caplog)


def test_fit_goes_on_from_the_last(here):
    fit("--ckpt_path", "last", "--trainer.max_epochs", "5", "--trainer.logger", "false")
    before, after = (torch.load(path, weights_only=True) for path in (LAST, "checkpoints/last.ckpt"))
    assert (before["epoch"], after["epoch"]) == (3, 5)
    assert before["global_step"] / 3 == after["global_step"] / 5


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["--trainer.logger", "false"], "checkpoints"),
        (
            ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "own"],
            "own/lightning_logs/version_0/checkpoints",
        ),
        (
            ["--trainer.logger", "TensorBoardLogger", "--trainer.logger.save_dir", "own", "--trainer.logger.name", "a"],
            "own/a/version_0/checkpoints",
        ),
        (["--trainer.default_root_dir", "below/it"], "below/it/lightning_logs/version_0/checkpoints"),
        (
            [
                "--trainer.callbacks",
                "[{class_path: ModelCheckpoint, init_args: {dirpath: 'a [1]', save_last: true, monitor: train/loss}}]",
            ],
            "a [1]",
        ),
    ],
)
def test_last_is_looked_for_where_this_run_would_write(tmp_path, monkeypatch, capsys, caplog, arguments, where):
    monkeypatch.chdir(tmp_path)
    assert re.match(
        "ckpt_path last: no run has left a last.ckpt in .+; give",
        refused(capsys, "test", *CONFIG, *arguments, "--ckpt_path", "last"),
    )
    fit(*arguments, "--trainer.check_val_every_n_epoch", "1")
    main(["validate", *CONFIG, *arguments, "--ckpt_path", "last"])
    assert re.search(rf"Checkpoint last: (/.+/)?{re.escape(where)}/last\.ckpt", told(capsys, caplog))


@pytest.mark.parametrize("subcommand", ["fit", "predict"])
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("last", "ckpt_path last: no run has left a last.ckpt in lightning_logs/*/checkpoints, lightning_logs/*/*/ch"),
        ("best", "ckpt_path best: no run has left a last.ckpt in "),
        ("hpc", "ckpt_path hpc: there is no hpc_ckpt_N.ckpt in .; give"),
        ("registry", "ckpt_path registry needs litmodels, which is not installed: give"),
        ("registry:mine:version:1", "ckpt_path registry:mine:version:1 needs litmodels"),
        ("Last", "ckpt_path Last does not exist"),
    ],
)
def test_without_a_run_each_word_is_refused(tmp_path, monkeypatch, capsys, subcommand, word, message):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, subcommand, *CONFIG, "--ckpt_path", word).startswith(message)
    assert not list(tmp_path.iterdir())


def test_best_is_the_newest_runs(here, capsys, caplog):
    message = "ckpt_path best: the newest run, that of lightning_logs/version_1/checkpoints/last.ckpt, has kept no best"
    assert refused(capsys, "validate", *CONFIG, "--ckpt_path", "best").startswith(message)
    fit(*BEST)
    main(["validate", *CONFIG, "--trainer.logger", "false", "--ckpt_path", "best"])
    assert "lightning_logs/version_2/checkpoints/kept.ckpt" in told(capsys, caplog)
    (here / "lightning_logs" / "version_2" / "checkpoints" / "kept.ckpt").unlink()
    assert "has kept no best" in refused(capsys, "validate", *CONFIG, "--ckpt_path", "best")


def test_hpc_is_the_highest_number(here, capsys, caplog):
    for number in (2, 10):
        shutil.copy(LAST, f"hpc_ckpt_{number}.ckpt")
    main(["validate", *CONFIG, "--trainer.logger", "false", "--ckpt_path", "hpc"])
    assert "Checkpoint hpc: hpc_ckpt_10.ckpt" in told(capsys, caplog)

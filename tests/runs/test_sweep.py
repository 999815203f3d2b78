"""A grid of fits: which they are, that they end as they should however often the sweep is stopped, and their table."""

import contextlib
import json
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from scent_lightning.cli import main as cli
from scent_lightning.commands.sweep import main
from scent_lightning.errors import InputError
from scent_lightning.runs.grid import grid_of
from scent_lightning.runs.sweep import in_a_process
from tests.forked import Forked, start_command

SHORT = ["--trainer.max_epochs", "2", "--trainer.check_val_every_n_epoch", "1"]
GRID = ["dro_diabetes", *SHORT, "--model.tau", "0.2", "5", "--dual", "SOX:gamma=0.5", "BSGD"]


def here(arguments, log, threads):
    """Run it in this process: to start one takes nine seconds."""
    with log.open("a") as file, contextlib.redirect_stderr(file):
        try:
            cli(arguments)
        except SystemExit as stopped:
            return int(stopped.code or 0)
    return 0


def commands(capsys) -> list[list[str]]:
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_the_commands_of_a_grid(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cli(["sweep", *GRID, "--seeds", "0", "1", "--out", "mine", "--dry_run"])
    found = commands(capsys)
    assert len(found) == 8
    assert found[0] == [
        *["scent-lightning", "fit", "--config", "dro_diabetes", "--dual", "SOX", "--dual.gamma", "0.5", *SHORT],
        *["--model.tau", "0.2", "--seed_everything", "0", "--trainer.default_root_dir", "mine"],
        *["--name", "tau=0.2,SOX,gamma=0.5,seed=0", "--trainer.enable_progress_bar", "false"],
    ]
    assert len({command[command.index("--name") + 1] for command in found}) == 8
    assert not list(tmp_path.iterdir())


def test_a_sweep_ends_with_a_table_and_is_not_run_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ran = []

    def counted(arguments, log, threads):
        ran.append(arguments)
        return here(arguments, log, threads)

    main([*GRID[:-1], "--seeds", "0", "1"], counted)
    said = capsys.readouterr().out
    assert re.search(r"\[4/4\] tau=5,seed=1 +\d+ s", said)
    assert re.search(r"^tau +runs +val/entropic_risk last", said, re.MULTILINE)
    assert len(re.findall(r"^(?:0\.2|5\.0) +2 ", said, re.MULTILINE)) == 2
    assert len(list(Path("sweeps/dro_diabetes").rglob("last.ckpt"))) == len(ran) == 4
    main([*GRID[:-1], "--seeds", "0", "1", "2", "--dry_run"])
    assert len(commands(capsys)) == 2
    main([*GRID[:-1], "--seeds", "0", "1"], counted)
    said = capsys.readouterr().out
    assert "4 of 4 runs are finished already" in said
    assert "val/entropic_risk last" in said
    assert len(ran) == 4


def test_one_that_fails_does_not_stop_the_rest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    grid = ["dro_diabetes", *SHORT, "--model.tau", "-1", "2"]
    with pytest.raises(SystemExit) as stopped:
        main(grid, here)
    assert stopped.value.code == 1
    said = capsys.readouterr().out
    assert re.search(
        r"\[1/2\] tau=-1,seed=0  failed with code 2 after \d+ s: scent-lightning: error: tau must be", said
    )
    assert re.search(r"\[2/2\] tau=2,seed=0  \d+ s", said)
    assert "1 run has failed; what was printed is in sweeps/dro_diabetes/output" in said
    state = json.loads(Path("sweeps/dro_diabetes/sweep.json").read_text())
    assert {name: run["status"] for name, run in state.items()} == {
        "tau=-1,seed=0": "failed",
        "tau=2,seed=0": "finished",
    }
    main([*grid, "--dry_run"])
    (again,) = commands(capsys)
    assert "--model.tau -1" in " ".join(again)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_what_was_interrupted_goes_on_from_its_last_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    started: list[Forked] = []

    def killed(arguments, log, threads):
        """As by a power cut, once there is a checkpoint."""
        process = start_command(tmp_path, *arguments)
        started.append(process)
        until(lambda: list(Path("out").rglob("last.ckpt")))
        process.kill()
        process.wait()
        raise KeyboardInterrupt

    grid = ["dro_diabetes", "--trainer.max_epochs", "60", "--trainer.check_val_every_n_epoch", "30", "--out", "out"]
    with pytest.raises(SystemExit) as stopped:
        main(grid, killed)
    assert stopped.value.code == 130
    assert started[0].returncode == -signal.SIGKILL
    main([*grid, "--dry_run"])
    (again,) = commands(capsys)[-1:]
    assert again[-2:] == ["--ckpt_path", "out/lightning_logs/seed=0/version_0/checkpoints/last.ckpt"]
    main(grid, here)
    assert [path.name for path in Path("out/lightning_logs/seed=0").iterdir()] == ["version_0"]
    assert "run has not ended" not in capsys.readouterr().out


def test_a_process_of_its_own_and_its_threads(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "scent_lightning.py").write_text(
        "import os, sys; print(os.environ['OMP_NUM_THREADS'], *sys.argv[1:]); sys.exit(3)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    assert in_a_process(["fit", "--x"], tmp_path / "log.txt", 4) == 3
    assert (tmp_path / "log.txt").read_text() == "4 fit --x\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.tau", "1", "2"], "a sweep needs a configuration"),
        (["x", "--model.tau", "1", "1"], "--model.tau has the value 1 more than once"),
        (["x", "--model.tau", "1", "2", "--model.tau", "3", "4"], "--model.tau is given twice"),
        (["x", "--dual", "SOX:0.5", "BSGD"], "--dual SOX:0.5 must be like SOX:gamma=0.5"),
        (["x", "--name", "a"], "--name cannot be set in a sweep: each run has the name of its settings"),
        (["x", "--seed_everything", "1", "2"], "--seed_everything cannot be set in a sweep: the seeds are --seeds"),
        (["x", "--trainer.logger.name", "b"], "--trainer.logger.name cannot be set in a sweep"),
        (["x", "--data.path", "a/rows", "b/rows"], "two runs of the sweep would have the same name, path=rows,seed=0"),
    ],
)
def test_a_grid_that_makes_no_sense_is_told(arguments, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        grid_of(arguments, [0])


def test_options_with_one_value_and_negative_numbers():
    grid = grid_of(["a", "b", "--dual.log_alpha", "-5", "-1e-3", "auto", "--data.encode=true", "--flag"], [3])
    assert grid.configs == ["a", "b"]
    assert grid.axes == {"--dual.log_alpha": ["-5", "-1e-3", "auto"]}
    assert grid.fixed == ["--data.encode", "true", "--flag"]
    assert [trial.name for trial in grid.trials()] == [
        "log_alpha=-5,seed=3",
        "log_alpha=-1e-3,seed=3",
        "log_alpha=auto,seed=3",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dro_diabetis"], "config dro_diabetis is neither a file nor"),
        (["dro_diabetes", "--jobs", "0"], "jobs must be at least 1, got 0"),
        (["dro_diabetes", "--seeds", "1", "1"], "seeds must be different, got 1 1"),
        (["dro_diabetes", "--out", "foreign"], "foreign/sweep.json is not one that a sweep has written"),
        (["dro_diabetes", "--out", "other"], "other holds a run seed=0 with other arguments, fit --config x"),
    ],
)
def test_wrong_arguments_are_one_sentence(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    for folder, text in (
        ("foreign", "[1]"),
        ("other", '{"seed=0": {"arguments": ["--config", "x"], "status": "begun"}}'),
    ):
        Path(folder).mkdir()
        Path(folder, "sweep.json").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        cli(["sweep", *arguments])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"scent-lightning: error: {message}")


def test_a_sampler_chooses_and_goes_on(tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    search = [
        "dro_diabetes",
        *SHORT,
        "--model.lr",
        "1e-4..10",
        "--dual",
        "SCENT",
        "BSGD",
        "--data.batch_size",
        "16..64",
    ]
    main([*search, "--trials", "2"], here)
    names = {path.name for path in Path("sweeps/dro_diabetes/lightning_logs").iterdir()}
    assert len(names) == 2
    for name in names:
        lr, batch = re.fullmatch(r"lr=(\S+),(?:SCENT|BSGD),batch_size=(\d+),seed=0", name).groups()
        assert 1e-4 <= float(lr) <= 10
        assert 16 <= int(batch) <= 64
    assert "val/entropic_risk last" in capsys.readouterr().out
    stops = iter([False, True])

    def stopped(arguments, log, threads):
        if next(stops):
            raise KeyboardInterrupt
        return here(arguments, log, threads)

    with pytest.raises(SystemExit):
        main([*search, "--trials", "5"], stopped)
    main([*search, "--trials", "5"], here)
    state = json.loads(Path("sweeps/dro_diabetes/sweep.json").read_text())
    assert len(state) == 5
    assert {run["status"] for run in state.values()} == {"finished"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trials", "2"], "--trials needs an option with several values, or with a range"),
        (["--trials", "0", "--model.lr", "1..2"], "trials must be at least 1, got 0"),
        (["--trials", "2", "--model.lr", "2..1"], "--model.lr 2..1 must be a range of numbers, the smaller first"),
        (["--trials", "2", "--model.lr", "1..2", "--dry_run"], "dry_run cannot know what --trials will choose"),
    ],
)
def test_a_search_that_makes_no_sense_is_told(tmp_path, monkeypatch, capsys, arguments, message):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli(["sweep", "dro_diabetes", *arguments])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"scent-lightning: error: {message}")


def test_without_optuna_the_way_to_it_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SystemExit) as stopped:
        cli(["sweep", "dro_diabetes", "--model.lr", "1..2", "--trials", "2"])
    assert stopped.value.code == 2
    assert "--trials needs optuna; install it with pip install 'scent-lightning[sweep]'" in capsys.readouterr().err

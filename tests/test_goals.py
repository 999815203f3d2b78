"""The table of goals at the top of the guide to running: every task is there, and its commands run."""

import re
import runpy
import shlex
import sys

from scent_lightning import tasks
from scent_lightning.cli import main
from scent_lightning.configurations import configuration_folder
from tests.conftest import ROOT
from tests.test_readme import RUNNING, SHORT, TEXT, commands

TABLE = RUNNING[: RUNNING.index("## The command line")]
GOALS = [shlex.split(command) for command in re.findall(r"`scent-lightning ([^`]+)`", TABLE)]


def on_data(arguments):
    """A command less what another run of the same data may set otherwise, and its configuration by name."""
    arguments = [re.sub(r"^configs/(\w+)\.yaml$", r"\1", argument) for argument in arguments]
    pairs = list(zip(arguments[1::2], arguments[2::2], strict=True))
    kept = sorted(pair for pair in pairs if not pair[0].startswith(("--trainer.", "--dual", "--model.")))
    return arguments[0], *kept


RUN = {on_data(arguments) for text in (TEXT, RUNNING) for program, *arguments in commands(text) if len(arguments) % 2}


def test_the_table_has_every_task():
    folder = configuration_folder()
    named = {(folder / f"{arguments[arguments.index('--config') + 1]}.yaml").read_text() for arguments in GOALS}
    used = set(re.findall(r"class_path: (\w+Task)", "\n".join(named)))
    assert used == {name for name in tasks.__all__ if name.endswith("Task") and name != "BaseTask"}


def test_commands_that_no_other_test_runs_run(tmp_path, monkeypatch):
    others = [arguments for arguments in GOALS if on_data(arguments) not in RUN]
    assert len(others) < len(GOALS) - 5
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["small_data.py", "small_data"])
    runpy.run_path(str(ROOT / "examples" / "small_data.py"), run_name="__main__")
    monkeypatch.setattr(sys, "argv", ["scent-lightning"])
    for arguments in others:
        main([*arguments, *SHORT, "--trainer.max_epochs", "1"])  # of one given twice, the latter

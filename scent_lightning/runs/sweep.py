"""Run the fits of a grid in processes: what is done is not done again, and what was interrupted is gone on with."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from scent_lightning.errors import InputError
from scent_lightning.runs.folders import LOGS
from scent_lightning.runs.grid import Trial

__all__ = ["Sweep", "command_of", "in_a_process"]

Work = Callable[[list[str], Path, int], int]
_STATE = "sweep.json"
_BEGUN, _FINISHED, _FAILED = "begun", "finished", "failed"


def in_a_process(arguments: list[str], log: Path, threads: int) -> int:
    """Run ``scent-lightning`` with these arguments in a process of its own.

    Args:
        arguments: of the command line.
        log: file that takes what it prints.
        threads: how many it may have, unless OMP_NUM_THREADS is set.

    Returns:
        Its exit code.
    """
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    with log.open("a", encoding="utf-8") as file:
        command = [sys.executable, "-m", "scent_lightning", *arguments]
        return subprocess.run(command, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL).returncode


class Sweep:
    """The runs of a grid in a folder, which remembers how each has ended.

    Args:
        folder: for runs, logs and ``sweep.json``.
        trials: the runs.
        work: runs a command line, and returns its exit code.

    Raises:
        InputError: the folder holds a run of the same name and other arguments, or another file of that name.
    """

    def __init__(self, folder: Path, trials: Iterable[Trial], work: Work = in_a_process) -> None:
        self.folder = folder
        self.trials = list(trials)
        self.work = work
        self._file = folder / _STATE
        self._state: dict[str, Any] = self._read()
        for trial in self.trials:
            before = self._state.get(trial.name)
            if before is not None and before["arguments"] != trial.arguments:
                raise InputError(
                    f"{folder} holds a run {trial.name} with other arguments, fit {shlex.join(before['arguments'])}: "
                    "give another folder by --out"
                )

    def _read(self) -> dict[str, Any]:
        if not self._file.exists():
            return {}
        try:
            state = json.loads(self._file.read_text(encoding="utf-8"))
            if all(isinstance(each["arguments"], list) for each in state.values()):
                return dict(state)
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            pass
        raise InputError(f"{self._file} is not one that a sweep has written; give another folder by --out")

    def _note(self, trials: Iterable[Trial], status: str) -> None:
        for trial in trials:
            self._state[trial.name] = {"arguments": trial.arguments, "status": status}
        part = self._file.with_name(f".{_STATE}.part")
        part.write_text(json.dumps(self._state, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self._file)

    def log_of(self, trial: Trial) -> Path:
        """The file with what a run has printed."""
        return self.folder / "output" / f"{trial.name}.txt"

    def missing(self) -> list[Trial]:
        """The runs that are not finished yet."""
        return [trial for trial in self.trials if self._state.get(trial.name, {}).get("status") != _FINISHED]

    def run(self, jobs: int, say: Callable[[str], Any] = print) -> list[Trial]:
        """Run what is missing, so many at a time; one that fails does not stop the others.

        Args:
            jobs: how many processes, at least 1.
            say: takes a line about each run that ends.

        Returns:
            The runs that have failed.
        """
        missing = self.missing()
        done, failed = len(self.trials) - len(missing), []
        threads = max(1, (os.cpu_count() or 1) // jobs)
        (self.folder / "output").mkdir(parents=True, exist_ok=True)
        self._note(missing, _BEGUN)
        if done:
            say(f"{done} of {len(self.trials)} runs are finished already")
        pool = ThreadPoolExecutor(jobs)
        try:
            ends = {pool.submit(self._fit, trial, threads): trial for trial in missing}
            for end in as_completed(ends):
                trial, (code, seconds) = ends[end], end.result()
                self._note([trial], _FINISHED if code == 0 else _FAILED)
                done += 1
                how = f"{seconds:.0f} s"
                if code != 0:
                    failed.append(trial)
                    how = f"failed with code {code} after {how}: {_last_line(self.log_of(trial))}"
                say(f"[{done}/{len(self.trials)}] {trial.name}  {how}")
        except KeyboardInterrupt:
            say("stopping; the same command goes on with what is missing")
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return failed

    def _fit(self, trial: Trial, threads: int) -> tuple[int, float]:
        """Run one, and give its exit code and how many seconds it took."""
        began = time.monotonic()
        code = self.work(command_of(trial, self.folder), self.log_of(trial), threads)
        return code, time.monotonic() - began


def command_of(trial: Trial, folder: Path) -> list[str]:
    """The command line of a run, which goes on from where it is.

    Args:
        trial: the run.
        folder: of the sweep.
    """
    arguments = ["fit", *trial.arguments, "--trainer.default_root_dir", str(folder), "--name", trial.name]
    arguments += ["--trainer.enable_progress_bar", "false"]
    found = (folder / LOGS / trial.name).glob("version_*/checkpoints/last*.ckpt")
    newest = max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    return arguments if newest is None else [*arguments, "--ckpt_path", str(newest)]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1].strip()[:300]} ({log})" if lines else str(log)

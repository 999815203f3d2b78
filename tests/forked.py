"""Command lines and scripts in processes forked from a warm one: to import torch and Lightning takes nine seconds.

A test of how a program starts runs it cold, by ``subprocess``; what it does after that is the same here.
"""

import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from tests.conftest import ROOT
from tests.helpers import FORKSERVER

LIMIT_S = 300


def _run(work, arguments, folder, environment, largest_file, out: Connection, err: Connection) -> None:
    """Make the forked process like one that was started in ``folder`` by a shell, and work."""
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments
    multiprocessing.set_start_method(None, force=True)  # processes of its own start by the system's default
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    work()


def _text(pipe: Connection) -> str:
    with open(os.dup(pipe.fileno()), encoding="utf-8", errors="replace") as file:
        return file.read()


class Forked:
    """A process to read, wait for and kill, much like ``subprocess.Popen``.

    Args:
        work: what it does; can be pickled.
        arguments: ``sys.argv``, of strings.
        folder: where it works.
        environment: variables on top of this process's; None takes one away.
        largest_file: the most bytes that a file may have.
    """

    def __init__(
        self,
        work: Callable[[], object],
        arguments: list[str],
        folder: Path,
        environment: Mapping[str, str | None] | None = None,
        largest_file: int | None = None,
    ):
        variables = {**os.environ, **(environment or {})}
        variables = {name: value for name, value in variables.items() if value is not None}
        pipes = [FORKSERVER.Pipe(duplex=False) for _ in range(2)]
        ends = [writer for _, writer in pipes]
        self._process = FORKSERVER.Process(
            target=_run, args=(work, arguments, str(folder), variables, largest_file, *ends)
        )
        self._process.start()
        for writer in ends:
            writer.close()
        self._readers = [reader for reader, _ in pipes]
        # Read from the start: a full pipe would stop the process.
        self._pool = ThreadPoolExecutor(2)
        self._texts = [self._pool.submit(_text, reader) for reader in self._readers]
        self._pool.shutdown(wait=False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """As of ``subprocess``: None while it runs, minus the signal that ended it."""
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped or ended; SIGCONT lets it go on."""
        os.kill(self.pid, signal.SIGSTOP)
        while self.returncode is None and Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2][1] != "T":
            time.sleep(0.0005)

    def wait(self, timeout: float = LIMIT_S) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return self.returncode

    def communicate(self, timeout: float = LIMIT_S) -> tuple[str, str]:
        """Standard output and standard error, to their ends."""
        self.wait(timeout)
        out, err = (text.result(timeout) for text in self._texts)
        for reader in self._readers:
            reader.close()
        return out, err


def start_command(folder: Path, *arguments: str, largest_file: int | None = None, **environment) -> Forked:
    """``scent-lightning`` with these arguments."""
    from scent_lightning.cli import main

    return Forked(main, ["scent-lightning", *arguments], folder, environment, largest_file)


def _script(path: str) -> None:
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def start_script(folder: Path, path: Path, *arguments, **environment) -> Forked:
    """``python path`` with these arguments."""
    return Forked(partial(_script, str(path)), [str(path), *map(str, arguments)], folder, environment)


def _module(name: str) -> None:
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def start_module(folder: Path, name: str, *arguments, **environment) -> Forked:
    """``python -m name`` with these arguments."""
    return Forked(partial(_module, name), [name, *map(str, arguments)], folder, environment)


def _code(text: str) -> None:
    exec(compile(text, "<code>", "exec"), {"__name__": "__main__"})


def start_code(folder: Path, text: str, *arguments) -> Forked:
    """``python -c text`` with these arguments."""
    return Forked(partial(_code, text), ["-c", *map(str, arguments)], folder)


def finished(process: Forked, check: bool = True, timeout: float = LIMIT_S) -> subprocess.CompletedProcess:
    """What it printed, and its exit status, which has to be 0 with ``check``."""
    out, err = process.communicate(timeout)
    if check:
        assert process.returncode == 0, out[-1000:] + err[-3000:]
    return subprocess.CompletedProcess([], process.returncode, out, err)


def cold_command(folder: Path, *arguments: str, program=("-m", "scent_lightning")) -> subprocess.CompletedProcess:
    """The command line from its very start, as a shell runs it; it has to end well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done

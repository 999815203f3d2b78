"""Checkpoint files under what can happen to them: a process killed, a disk that is full, a file of another kind."""

import errno
import os
import pickle
import random
import resource
import signal
import time
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch

from scent_lightning import checkpoint as module
from scent_lightning.checkpoint import AtomicCheckpointIO
from scent_lightning.errors import InputError
from scent_lightning.random_state import random_state, restore_random_state
from tests.forked import start_code
from tests.helpers import SoftmaxData, SoftmaxTask, quiet_trainer

IO = AtomicCheckpointIO()


class Harmful:
    """Would make a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def state(value=1.0, size=8):
    return {
        "epoch": 3,
        "pytorch-lightning_version": L.__version__,
        "state_dict": {"w": torch.full((size,), value)},
        "optimizer_states": [{"m": torch.ones(2)}],
    }


def assert_only(folder, name):
    assert [path.name for path in folder.iterdir()] == [name]


def test_round_trip_and_replacement(tmp_path):
    path = tmp_path / "deep" / "folder" / "a [1].ckpt"
    for value in (1.0, 2.0):
        IO.save_checkpoint(state(value), path)
    loaded = IO.load_checkpoint(path, weights_only=False)
    assert loaded["epoch"] == 3
    assert loaded["state_dict"]["w"].tolist() == [2.0] * 8
    assert loaded["optimizer_states"][0]["m"].tolist() == [1.0, 1.0]
    assert torch.equal(torch.load(path, weights_only=True)["state_dict"]["w"], loaded["state_dict"]["w"])
    assert_only(path.parent, path.name)
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_url_of_a_local_file_and_another_file_system(tmp_path):
    IO.save_checkpoint(state(), f"file://{tmp_path}/a.ckpt")
    assert (tmp_path / "a.ckpt").is_file()
    IO.save_checkpoint(state(), "memory://b.ckpt")
    assert IO.load_checkpoint("memory://b.ckpt")["epoch"] == 3


def test_what_is_loaded_outside_the_state_dict_is_independent_of_the_file(tmp_path):
    """An optimiser goes on with the tensors that it is given."""
    path = tmp_path / "a.ckpt"
    IO.save_checkpoint(state(), path)
    loaded = IO.load_checkpoint(path)
    mapped = {line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line}
    ranges = [tuple(int(end, 16) for end in pages.split("-")) for pages in mapped]

    def in_file(tensor):
        return any(low <= tensor.data_ptr() < high for low, high in ranges)

    assert in_file(loaded["state_dict"]["w"])
    assert not in_file(loaded["optimizer_states"][0]["m"])


def test_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    IO.save_checkpoint(state(1.0), path)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write checkpoint .*a\.ckpt: No space left on device") as caught:
        IO.save_checkpoint(state(2.0), path)
    assert caught.value.errno == errno.ENOSPC
    assert IO.load_checkpoint(path)["state_dict"]["w"][0] == 1.0
    assert_only(tmp_path, "a.ckpt")


def test_file_size_limit_in_the_midst_of_a_tensor(tmp_path):
    """torch's own error names a position; the system's reason is what the user gets."""
    path = tmp_path / "a.ckpt"
    IO.save_checkpoint(state(1.0), path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large; what was there before is unchanged"):
            IO.save_checkpoint(state(2.0, size=1_000_000), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert IO.load_checkpoint(path)["state_dict"]["w"][0] == 1.0
    assert_only(tmp_path, "a.ckpt")


def test_object_that_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.ckpt"
    IO.save_checkpoint(state(1.0), path)
    with pytest.raises(Exception, match="pickle"):
        IO.save_checkpoint({**state(2.0), "hook": lambda: None}, path)
    assert IO.load_checkpoint(path)["state_dict"]["w"][0] == 1.0
    assert_only(tmp_path, "a.ckpt")


KILLED = """
import sys, torch
from scent_lightning.checkpoint import AtomicCheckpointIO
value = torch.full((20_000_000,), 2.0)
while True:
    state = {"pytorch-lightning_version": "2.6", "state_dict": {"w": value}}
    AtomicCheckpointIO().save_checkpoint(state, sys.argv[1])
"""


def test_process_killed_while_it_writes(tmp_path):
    path = tmp_path / "a.ckpt"
    IO.save_checkpoint(state(1.0), path)
    process = start_code(tmp_path, KILLED, path)
    try:
        deadline = time.time() + 60
        stopped = False
        while not stopped and time.time() < deadline:
            # Stopped, looked at, and let go on if it was not in the midst of a write.
            time.sleep(0.005)
            process.stop()
            stopped = any(part.stat().st_size > 10_000_000 for part in parts(tmp_path))
            if not stopped:
                os.kill(process.pid, signal.SIGCONT)
    finally:
        process.kill()
        process.wait()
    found = IO.load_checkpoint(path)["state_dict"]["w"]
    assert found.tolist() == [1.0] * 8 or (found.numel() == 20_000_000 and bool((found == 2.0).all()))
    (left,) = parts(tmp_path)
    IO.save_checkpoint(state(3.0), path)
    assert left.exists(), "too young to be known as abandoned"
    hours_ago = time.time() - 2 * module.ABANDONED_AFTER_S
    os.utime(left, (hours_ago, hours_ago))
    other = left.with_name(left.name.replace("a.ckpt", "b.ckpt"))
    other.write_bytes(b"")
    os.utime(other, (hours_ago, hours_ago))
    IO.save_checkpoint(state(4.0), path)
    assert sorted(tmp_path.iterdir()) == sorted([path, other]), "only what was left of the same file is removed"


def parts(folder):
    return [part for part in folder.iterdir() if part.suffix == ".part"]


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"checkpoint .*no\.ckpt does not exist"):
        IO.load_checkpoint(tmp_path / "no.ckpt")


def damaged(path: Path, kind: str) -> None:
    IO.save_checkpoint(state(size=10_000), path)
    whole = path.read_bytes()
    if kind == "harmful":
        torch.save({"state_dict": {}, "extra": Harmful(path.parent / "ran")}, path)
    elif kind == "harmful, old format":
        torch.save({"extra": Harmful(path.parent / "ran")}, path, _use_new_zipfile_serialization=False)
    elif kind == "module":
        torch.save({"state_dict": torch.nn.Linear(2, 2)}, path)
    elif kind == "tensor":
        torch.save(torch.zeros(3), path)
    elif kind == "state dict":
        torch.save(torch.nn.Linear(2, 2).state_dict(), path)
    elif kind == "without a version":
        torch.save({"state_dict": {}}, path)
    elif kind == "half":
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "without its end":
        path.write_bytes(whole[:-10])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("epoch: 3\nweights: [1, 2, 3]\n")
    elif kind == "folder":
        path.unlink()
        path.mkdir()


DAMAGES = {
    "harmful": "holds a posix.mkdir, and not only tensors and plain data: it is not read",
    "harmful, old format": "holds a posix.mkdir, and not only tensors",
    "module": "holds a torch.nn.modules.linear.Linear, and not only tensors",
    "tensor": "is no checkpoint of a run: it has no state_dict",
    "state dict": "is no checkpoint of a run: it has no state_dict",
    "without a version": "is no checkpoint of Lightning",
    "half": "is truncated, damaged",
    "without its end": "is truncated, damaged",
    "empty": "is of another kind",
    "text": "is of another kind",
    "folder": "cannot be read: Is a directory",
}


@pytest.mark.parametrize(("kind", "message"), DAMAGES.items(), ids=DAMAGES)
@pytest.mark.parametrize("weights_only", [None, False])
def test_damaged_and_foreign_files_are_one_error_and_run_nothing(tmp_path, kind, message, weights_only):
    path = tmp_path / "a.ckpt"
    damaged(path, kind)
    with pytest.raises(InputError, match=rf"checkpoint .*a\.ckpt {message}"):
        IO.load_checkpoint(path, weights_only=weights_only)
    with pytest.raises(InputError, match=rf"checkpoint .*a\.ckpt {message}"):
        SoftmaxTask.load_from_checkpoint(path, weights_only=weights_only)
    assert not (tmp_path / "ran").exists()


def test_trainer_resumes_from_it_to_the_same_end(tmp_path):
    path = tmp_path / "a.ckpt"

    def fit(epochs, **resumed):
        torch.manual_seed(0)
        data = SoftmaxData()
        trainer = quiet_trainer(max_epochs=epochs, plugins=[AtomicCheckpointIO()])
        model = SoftmaxTask(data.num_anchors)
        trainer.fit(model, datamodule=data, **resumed)
        trainer.save_checkpoint(path)
        return model

    whole = fit(4)
    fit(2)
    resumed = fit(4, ckpt_path=path)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert_only(tmp_path, "a.ckpt")


def test_from_an_open_file_nothing_is_run_either(tmp_path, monkeypatch):
    """Whatever torch is told to do where a program does not say."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = tmp_path / "a.ckpt"
    damaged(path, "harmful")
    with pytest.raises(InputError, match=r"holds a posix\.mkdir"):
        SoftmaxTask.load_from_checkpoint(path)
    with path.open("rb") as file, pytest.raises(pickle.UnpicklingError):
        SoftmaxTask.load_from_checkpoint(file)
    with pytest.raises(InputError, match=r"holds a posix\.mkdir"):
        quiet_trainer(plugins=[AtomicCheckpointIO()]).validate(SoftmaxTask(24), SoftmaxData(), ckpt_path=path)
    assert not (tmp_path / "ran").exists()


def test_the_weights_of_spawned_processes_are_read(tmp_path):
    """Lightning hands them over without the rest of a checkpoint; in any other file they are refused."""
    weights = {"weight": torch.arange(3.0)}
    for name in (".temp.ckpt", "other.ckpt"):
        AtomicCheckpointIO().save_checkpoint(weights, tmp_path / name)
    assert torch.equal(AtomicCheckpointIO().load_checkpoint(tmp_path / ".temp.ckpt")["weight"], weights["weight"])
    with pytest.raises(InputError, match="no checkpoint of a run"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "other.ckpt")


def test_random_states_come_back_from_those_of_all_processes():
    """Each is a row of a larger tensor, which torch itself cannot read as a state."""
    states = []
    for seed in (1, 2):
        L.seed_everything(seed, verbose=False)
        torch.randn(1), np.random.standard_normal(), random.gauss(0, 1)  # noqa: NPY002
        states.append(random_state())
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    expected = [torch.rand(1).item(), np.random.random(), random.random()]  # noqa: NPY002
    restore_random_state({name: values[0] for name, values in stacked.items()})
    assert [torch.rand(1).item(), np.random.random(), random.random()] != expected  # noqa: NPY002
    restore_random_state({name: values[1] for name, values in stacked.items()})
    assert [torch.rand(1).item(), np.random.random(), random.random()] == expected  # noqa: NPY002

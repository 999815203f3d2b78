"""Each fault that a long run meets, in a real run of the command line: one sentence and nothing corrupted."""

import copy
import math
import os
import resource
import signal
import time
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch

from scent_lightning.callbacks import LastCheckpoint
from scent_lightning.cli import main
from scent_lightning.errors import DivergenceError, DualDivergenceError
from tests.conftest import ROOT
from tests.forked import Forked, start_command
from tests.helpers import SoftmaxData, SoftmaxTask, quiet_trainer

DRO = ["--config", str(ROOT / "configs" / "dro_diabetes.yaml"), "--trainer.enable_progress_bar", "false"]
XC = [
    "--config",
    str(ROOT / "configs" / "xc_glyphs.yaml"),
    "--trainer.enable_progress_bar",
    "false",
    "--data.path",
    ".",
]
ENDLESS = ["--trainer.max_epochs", "100000", "--trainer.logger", "false"]


def start(folder, *arguments, limit=None) -> Forked:
    """The command line in a process; ``limit`` is the most bytes that a file may have."""
    return start_command(folder, *arguments, largest_file=limit)


def sentence(process, code=2) -> str:
    """The one line in which a process says why it ended."""
    try:
        _, error = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, error
    assert "Traceback" not in error
    (line,) = (line for line in error.splitlines() if "error: " in line)
    assert error.strip().splitlines()[-1] == line
    return line.removeprefix("scent-lightning: error: ")


def wait_until(condition) -> None:
    deadline = time.time() + 120
    while not condition():
        assert time.time() < deadline
        time.sleep(0.02)


def wait_for(path: Path) -> None:
    wait_until(path.exists)


def loader_process(process) -> int:
    """Number of the process that loads data for ``process``, once there is one."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(children.read_text)
    return int(children.read_text().split()[0])


def finite(path: Path) -> bool:
    state = torch.load(path, weights_only=True)["state_dict"]
    assert any(name.endswith(".nu") for name in state)
    return all(bool(torch.isfinite(value).all()) for value in state.values() if isinstance(value, torch.Tensor))


# ---------------------------------------------------------------- divergence


@pytest.mark.parametrize("lr", ["1e3", "1e30", "1e38"])
def test_diverging_run_leaves_a_finite_checkpoint_that_can_be_gone_on_from(tmp_path, lr):
    line = sentence(start(tmp_path, "fit", *DRO, "--model.weight_step=gradient", "--model.lr", lr), code=1)
    assert line.startswith("dual variable 'nu' with SCENT(") or "is not finite" in line
    (last,) = tmp_path.glob("lightning_logs/version_0/checkpoints/*")
    assert last.name == "last.ckpt"
    assert finite(last)


class StopsAt(L.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise KeyError("stopped")


def fit_with_last(folder, model, callbacks=(), every=0.0, **arguments):
    callbacks = [LastCheckpoint(at_most_every_s=every), *callbacks]
    trainer = quiet_trainer(max_epochs=3, enable_checkpointing=True, callbacks=callbacks, default_root_dir=folder)
    torch.manual_seed(0)
    trainer.fit(model, SoftmaxData(), **arguments)


def step_of(folder):
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["last.ckpt"]
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]


@pytest.mark.parametrize(("stopped", "every", "kept"), [(0, 0.0, 0), (5, 0.0, 3), (5, 1e9, 0)])
def test_stopped_run_goes_on_from_its_last_checkpoint_to_the_same_end(tmp_path, stopped, every, kept):
    """Three steps an epoch; the file is of the start, of the last epoch's end, or, within the interval, of none."""
    torch.manual_seed(0)
    whole = SoftmaxTask(24)
    state = copy.deepcopy(whole.state_dict())
    fit_with_last(tmp_path / "whole", whole)
    assert step_of(tmp_path / "whole") == 9
    part = SoftmaxTask(24)
    part.load_state_dict(state)
    with pytest.raises(KeyError, match="stopped"):
        fit_with_last(tmp_path / "part", part, [StopsAt(stopped)], every)
    assert step_of(tmp_path / "part") == kept
    resumed = SoftmaxTask(24)
    last = tmp_path / "part" / "checkpoints" / "last.ckpt"
    fit_with_last(tmp_path / "resumed", resumed, every=every, ckpt_path=last)
    assert step_of(tmp_path / "resumed") == 9
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


class BreaksAt(SoftmaxTask):
    """Weights that are not finite after the last batch of an epoch, where no loss shows it any more."""

    def __init__(self, epoch):
        super().__init__(24)
        self.epoch = epoch

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.current_epoch == self.epoch and self.trainer.is_last_batch:
            self.linear.weight.data[0, 0] = math.inf


@pytest.mark.parametrize("epoch", [0, 2])
def test_last_checkpoint_is_of_finite_weights(tmp_path, epoch):
    with pytest.raises(DivergenceError, match=rf"linear\.weight is not finite at the end of epoch {epoch}"):
        fit_with_last(tmp_path, BreaksAt(epoch))
    assert finite(tmp_path / "checkpoints" / "last.ckpt")
    assert step_of(tmp_path) == 3 * epoch
    assert issubclass(DualDivergenceError, DivergenceError)


# ---------------------------------------------------------------- disks and folders


def test_disk_full_at_the_first_checkpoint(tmp_path):
    line = sentence(start(tmp_path, "fit", *DRO, "--trainer.logger", "false", limit=3000))
    assert line.startswith("cannot write checkpoint ")
    assert line.endswith("last.ckpt: File too large; what was there before is unchanged")
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.slow
def test_disk_full_while_logging(tmp_path):
    """TensorBoard writes in a thread of its own, which would print a traceback."""
    line = sentence(start(tmp_path, "fit", *DRO, "--trainer.max_epochs", "1000", limit=40_000))
    assert line == "a file cannot be read or written: File too large"
    assert finite(tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt")


@pytest.mark.slow
def test_disk_full_in_the_midst_of_a_run(tmp_path):
    """The limit comes once there is a checkpoint; the next one cannot be written."""
    process = start(tmp_path, "fit", *DRO, *ENDLESS)
    path = tmp_path / "checkpoints" / "last.ckpt"
    wait_for(path)
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (3000, hard))
    assert "last.ckpt: File too large; what was there before is unchanged" in sentence(process)
    assert list(path.parent.iterdir()) == [path]
    assert finite(path)


@pytest.mark.parametrize("logger", [[], ["--trainer.logger", "false"]], ids=["logger", "no logger"])
def test_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys, logger):
    """Below a regular file nothing can be written, not even by the system's administrator."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert "Not a directory: " in in_process(capsys, "fit", *DRO, "--trainer.default_root_dir", "file/runs", *logger)


def in_process(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    (line,) = (line for line in error.splitlines() if line.startswith("scent-lightning: error: "))
    return line


# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint of a run of DRO."""
    folder = tmp_path_factory.mktemp("whole")
    main(
        [
            "fit",
            *DRO,
            "--trainer.logger",
            "false",
            "--trainer.max_epochs",
            "1",
            "--trainer.default_root_dir",
            str(folder),
        ]
    )
    return folder / "checkpoints" / "last.ckpt"


def foreign(path, whole, kind):
    """A file that is no checkpoint of this run's task, or not all of it."""
    state = torch.load(whole, weights_only=True)
    if kind == "truncated":
        path.write_bytes(whole.read_bytes()[:-1000])
    elif kind == "text":
        path.write_text("weights: none\n")
    elif kind == "state dict":
        torch.save(torch.nn.Linear(10, 1).state_dict(), path)
    elif kind == "another task":
        trainer = quiet_trainer(max_epochs=1)
        trainer.fit(SoftmaxTask(24), SoftmaxData())
        trainer.save_checkpoint(path)
    elif kind == "another width":
        state["state_dict"]["network.weight"] = torch.zeros(1, 3)
        torch.save(state, path)
    elif kind == "weights only":
        del state["optimizer_states"], state["lr_schedulers"]
        torch.save(state, path)
    elif kind == "another optimiser":
        state["optimizer_states"][0]["param_groups"] *= 2
        torch.save(state, path)


FOREIGN = {
    "truncated": "checkpoint a.ckpt is truncated, damaged",
    "text": "checkpoint a.ckpt is of another kind",
    "state dict": "checkpoint a.ckpt is no checkpoint of a run",
    "another task": "the checkpoint does not fit this model, it is of another task or of other settings: Missing key",
    "another width": "the checkpoint does not fit this model, it is of another task or of other settings: size",
    "weights only": "the run cannot be resumed from this checkpoint: Trying to restore optimizer state",
    "another optimiser": "the checkpoint does not fit this model's optimiser: loaded state dict has a different number",
}


@pytest.mark.parametrize(
    ("kind", "subcommand"),
    [(kind, "fit") for kind in FOREIGN] + [(kind, "validate") for kind in list(FOREIGN)[:5]],
)
def test_foreign_checkpoint(tmp_path, monkeypatch, capsys, whole, kind, subcommand):
    monkeypatch.chdir(tmp_path)
    foreign(tmp_path / "a.ckpt", whole, kind)
    line = in_process(capsys, subcommand, *DRO, "--trainer.logger", "false", "--ckpt_path", "a.ckpt")
    assert FOREIGN[kind] in line


# ---------------------------------------------------------------- data


@pytest.fixture
def features(tmp_path):
    """A training split of 20,000 rows, as files of NumPy."""
    (tmp_path / "train").mkdir()
    generator = np.random.default_rng(0)
    np.save(tmp_path / "train" / "features.npy", generator.standard_normal((20_000, 16)).astype(np.float16))
    np.save(tmp_path / "train" / "labels.npy", generator.integers(50, size=20_000))
    return tmp_path


CUT_TO = 5000


class Cuts(L.Callback):
    """Cuts a file short at a step; between steps, no batch is being read in this process."""

    def __init__(self, path: str, step: int):
        self.path = path
        self.step = step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            os.truncate(self.path, CUT_TO)


def cut(size, name):
    return f"train/{name} was cut from {size} to {CUT_TO} bytes while it was in use"


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("name", ["features.npy", "features.pt", "labels.npy"])
def test_file_that_becomes_shorter_while_it_is_in_use(features, workers, name):
    path = features / "train" / name
    if path.suffix == ".pt":
        array = path.with_suffix(".npy")
        torch.save(torch.from_numpy(np.load(array)), path)
        array.unlink()
    size = path.stat().st_size
    callback = ["--trainer.callbacks+=tests.test_faults.Cuts", f"--trainer.callbacks.path={path}"]
    run = start(
        features, "fit", *XC, *ENDLESS, "--data.num_workers", workers, *callback, "--trainer.callbacks.step", "200"
    )
    assert sentence(run) == cut(size, name)
    assert finite(features / "checkpoints" / "last.ckpt")


@pytest.mark.slow
def test_file_that_becomes_shorter_while_a_loader_process_reads_it(features):
    """That process dies of it, between its look at the length and the end of its reading."""
    path = features / "train" / "features.npy"
    size = path.stat().st_size
    process = start(features, "fit", *XC, *ENDLESS, "--data.num_workers", "1")
    wait_for(features / "checkpoints" / "last.ckpt")
    child = loader_process(process)
    os.kill(child, signal.SIGSTOP)
    os.truncate(path, CUT_TO)
    os.kill(child, signal.SIGBUS)
    os.kill(child, signal.SIGCONT)
    assert sentence(process) == cut(size, "features.npy")
    assert finite(features / "checkpoints" / "last.ckpt")


@pytest.mark.slow
def test_loader_process_that_dies(features):
    process = start(features, "fit", *XC, *ENDLESS, "--data.num_workers", "1")
    wait_for(features / "checkpoints" / "last.ckpt")
    os.kill(loader_process(process), signal.SIGKILL)
    line = sentence(process)
    assert line.startswith("a process that loads data has died, of too little memory perhaps (")
    assert finite(features / "checkpoints" / "last.ckpt")


@pytest.mark.slow
def test_error_in_a_loader_process_is_its_sentence(features):
    array = np.load(features / "train" / "features.npy", mmap_mode="r+")
    array[17, 3] = np.nan
    array.flush()
    line = sentence(start(features, "fit", *XC, *ENDLESS, "--data.num_workers", "1"))
    assert line.startswith("features of split 'train' are NaN or infinite in row 17")

"""Train a setting, then kill such a run at random places, resume it each time, and compare; run by test_resume.py.

Imports once and forks for every run: each is a process of its own, and takes no second to start.
"""

import os
import random
import signal
import sys
import time
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from scent_lightning.checkpoint import AtomicCheckpointIO
from tests import settings
from tests.helpers import quiet_trainer

EPOCHS, EVERY = 3, 2
SETTINGS = {
    **settings.SETTINGS,
    "classification": partial(settings.classification, dropout=0.3),
    "uniform": partial(settings.classification, negatives="uniform", dropout=0.3),
    "images": settings.images,
}
HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end")


class Kill(Callback):
    """SIGKILL at a hook of a step."""

    def __init__(self, step: int, hook: str):
        self.step, self.hook = step, hook
        setattr(self, hook, self._kill)

    def _kill(self, trainer, *_):
        if trainer.global_step >= self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(setting, data_folder: Path, run: Path, kill: Kill | None) -> None:
    os.setsid()
    L.seed_everything(5, verbose=False)
    task, data = setting(data_folder, 16)
    keep = ModelCheckpoint(run, filename="{step}", every_n_train_steps=EVERY, save_top_k=1, save_last=True)
    # The first of the two sees a step's end before the checkpoint of it is written, the other after.
    callbacks = [keep] if kill is None else [kill, keep] if kill.step % 2 else [keep, kill]
    trainer = quiet_trainer(
        max_epochs=EPOCHS, callbacks=callbacks, enable_checkpointing=True, plugins=[AtomicCheckpointIO()]
    )
    last = run / "last.ckpt"
    trainer.fit(task, datamodule=data, ckpt_path=str(last) if last.exists() else None, weights_only=True)
    trainer.save_checkpoint(run / "end.ckpt")


def in_a_fork(work, groups: list[int]) -> int:
    """Exit status of ``work()`` in a process of its own, whose group is added to ``groups``."""
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(process, 0)
    groups.append(process)
    return status


def wait_for_the_end_of(groups: list[int]) -> None:
    """Loader processes look every five seconds whether their run still lives; none may be left behind."""
    deadline = time.monotonic() + 30
    for group in groups:
        with suppress(ProcessLookupError):
            while True:
                os.killpg(group, 0)
                assert time.monotonic() < deadline, "a process was left behind"
                time.sleep(0.05)


def differences(first, second, place="") -> list[str]:
    if isinstance(first, torch.Tensor):
        return [] if first.dtype == second.dtype and torch.equal(first, second) else [place]
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return [f"{place}: {first.keys() ^ second.keys()}"]
        return [text for key in first for text in differences(first[key], second[key], f"{place}.{key}")]
    if isinstance(first, list | tuple):
        if len(first) != len(second):
            return [place]
        return [
            t for i, (a, b) in enumerate(zip(first, second, strict=True)) for t in differences(a, b, f"{place}.{i}")
        ]
    return [] if first == second else [f"{place}: {first} and {second}"]


def end_of(run: Path) -> dict:
    checkpoint = torch.load(run / "end.ckpt", weights_only=True)
    kept = ("state_dict", "optimizer_states", "lr_schedulers", "scent_lightning", "epoch", "global_step")
    loader = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    return {**{key: checkpoint[key] for key in kept}, "loader": loader}


def main(name: str, folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data = folder / "data"
    data.mkdir()
    setting = SETTINGS[name]
    groups: list[int] = []
    assert in_a_fork(partial(fit, setting, data, folder / "whole", None), groups) == 0
    expected = end_of(folder / "whole")
    steps = expected["global_step"]
    choice = random.Random(name)
    run = folder / "run"
    for step in sorted(choice.randrange(1, steps) for _ in range(kills)):
        kill = Kill(step, choice.choice(HOOKS))
        resumed = (run / "last.ckpt").exists()
        status = in_a_fork(partial(fit, setting, data, run, kill), groups)
        assert os.WIFSIGNALED(status), f"it was to be killed, it ended with {status}"
        print(f"{'resumed' if resumed else 'begun'}, killed at {kill.hook} of step {step} of {steps}", flush=True)
    assert in_a_fork(partial(fit, setting, data, run, None), groups) == 0
    wait_for_the_end_of(groups)
    found = differences(expected, end_of(run))
    assert not found, f"it ended otherwise: {found}"
    print("the same end")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))

"""What a run may end with that is no mistake in a program, each in one sentence."""

from __future__ import annotations

import os
import pickle
import re
import traceback

from scent_lightning.errors import DivergenceError, InputError

__all__ = ["failure"]


def failure(error: BaseException) -> tuple[int, str] | None:
    """Exit code and sentence for what can go wrong without a mistake in a program; None for all else.

    Code 2 for a wrong setting, file, folder or machine, 1 where training diverges.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, InputError):
        cause = cause.__cause__  # jsonargparse wraps what a constructor raises
    if cause is not None:
        return 2, _own_words(cause)
    if isinstance(error, DivergenceError):
        return 1, str(error)
    text = str(error)
    if (isinstance(error, RuntimeError) and re.match(r"DataLoader worker \(pid", text)) or _from_queue(error):
        return 2, (
            f"a process that loads data has died, of too little memory perhaps ({text.splitlines()[0].rstrip('. ')}); "
            "lower data.num_workers or the batch size"
        )
    if isinstance(error, OSError):
        return 2, _own_words(error)
    if isinstance(error, pickle.UnpicklingError):
        return 2, "a file holds other objects than tensors and plain data: it is not read, because that could run code"
    if isinstance(error, RuntimeError) and text.startswith("Error(s) in loading state_dict"):
        parts = [line.strip().rstrip(". ") for line in text.splitlines()[1:]]
        shown = "; ".join(part if len(part) < 200 else f"{part[:200]} …" for part in parts[:2])
        return 2, f"the checkpoint does not fit this model, it is of another task or of other settings: {shown}"
    if isinstance(error, ValueError) and text.startswith("loaded state dict"):
        return 2, f"the checkpoint does not fit this model's optimiser: {text}"
    if isinstance(error, KeyError) and "Trying to restore" in text:
        return 2, f"the checkpoint cannot be gone on from: {error.args[0]}"
    return None


def _from_queue(error: BaseException) -> bool:
    """Whether it comes of taking a batch from a loader process: that may see the process die before torch does."""
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, OSError | EOFError | RuntimeError | pickle.UnpicklingError) and any(
        frame.f_globals.get("__name__") == "multiprocessing.queues" for frame, _ in frames
    )


def _own_words(error: BaseException) -> str:
    """An error's message; of one that was raised in a loader process, without that process's traceback."""
    text = str(error)
    if re.match(r"Caught \w+ in DataLoader worker process", text):
        return text.strip().splitlines()[-1].partition(": ")[2]
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, OSError) and error.errno and error.strerror == os.strerror(error.errno):
        return f"a file cannot be read or written: {error.strerror}"
    return (error.strerror or text) if isinstance(error, OSError) else text

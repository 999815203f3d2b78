"""What a run may end with that is no mistake in a program, each in one sentence."""

from __future__ import annotations

import linecache
import os
import pickle
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import OutOfMemoryError

from scent_lightning.errors import DivergenceError, InputError

__all__ = ["TRACEBACK", "failure", "shows_traceback", "users_error"]

TRACEBACK = "SCENT_LIGHTNING_TRACEBACK"

# What stands between the command line and a user's own code; all else that is installed may be the user's.
# fmt: off
LIBRARIES = frozenset((
    "PIL", "fsspec", "google", "httpcore", "httpx", "huggingface_hub", "jsonargparse", "lightning",
    "lightning_fabric", "lightning_utilities", "matplotlib", "numpy", "open_clip", "pandas", "pyarrow", "requests",
    "safetensors", "scent_lightning", "scipy", "sklearn", "tensorboard", "timm", "torch", "torchdata",
    "torchmetrics", "torchvision", "tqdm", "typeshed_client", "urllib3", "webdataset", "yaml",
))
# fmt: on


def shows_traceback() -> bool:
    """Whether the user has asked for the whole traceback beside the sentence, by an environment variable."""
    return os.environ.get(TRACEBACK, "") not in ("", "0", "false")


def failure(error: BaseException) -> tuple[int, str] | None:
    """Exit code and sentence for what can go wrong without a mistake in a program; None for all else.

    Code 2 for a wrong setting, file, folder or machine, 1 where training diverges. What a user's own code raises, or is
    in the midst of, is never told in a sentence, but for the exceptions of this package.
    """
    errors = list(_behind(error))
    for cause in errors:
        if isinstance(cause, InputError):
            return 2, _own_words(cause)
    if isinstance(error, DivergenceError):
        return 1, str(error)
    text = str(error)
    if (isinstance(error, RuntimeError) and re.match(r"DataLoader worker \(pid", text)) or _from_queue(error):
        return 2, (
            f"a process that loads data has died, of too little memory perhaps ({text.splitlines()[0].rstrip('. ')}); "
            "lower data.num_workers or the batch size"
        )
    spawned = re.search(r"^scent_lightning\.errors\.(\w+): (.+)", text, re.MULTILINE)
    if spawned and "-- Process" in text:
        return 2 if spawned[1] == InputError.__name__ else 1, spawned[2]
    if users_error(error) is not None:
        return None
    return _of_system(error) or _of_checkpoint(error) or _of_library(errors)


def users_error(error: BaseException) -> BaseException | None:
    """What came out of code that is neither this package's nor a library's; None where there is no such."""
    return next((cause for cause in _behind(error) if _is_users(cause)), None)


def _behind(error: BaseException) -> Iterator[BaseException]:
    """An error and what it comes of.

    jsonargparse tries each type that an argument may have, and keeps one cause only of the error that it raises in the
    end: the others are in the frame that raises it.
    """
    yield error
    if error.__cause__ is not None:
        yield from _behind(error.__cause__)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "raise_union_unexpected_value":
            for tried in frame.f_locals.get("exceptions", []):
                if isinstance(tried, BaseException) and tried is not error.__cause__:
                    yield from _behind(tried)


def _is_users(error: BaseException) -> bool:
    files = [frame.f_code.co_filename for frame in _frames(error)]
    if isinstance(error, SyntaxError) and error.filename:
        files.append(error.filename)
    if "Original Traceback" in str(error) or "-- Process" in str(error):  # of another process, as text
        files += re.findall(r'^\s*File "(.+)", line \d+', str(error), re.MULTILINE)
    return any(_is_users_file(file) for file in files)


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


@cache
def _is_users_file(file: str) -> bool:
    # Frozen or made up by a library; or of a compiled module, which names its source as where it was compiled.
    if file.startswith("<") or not (Path(file).is_absolute() or Path(file).is_file()):
        return False
    path = Path(file).resolve()
    for installed in ("site-packages", "dist-packages"):
        if installed in path.parts:
            top = path.parts[len(path.parts) - path.parts[::-1].index(installed)]
            return top.removesuffix(".py") not in LIBRARIES
    folders = [Path(sysconfig.get_path("stdlib")).resolve()]
    loaded = [getattr(sys.modules.get(name), "__file__", None) for name in LIBRARIES]
    folders += [Path(init).resolve().parent for init in loaded if init]
    return not any(folder in path.parents for folder in folders)


def _of_system(error: BaseException) -> tuple[int, str] | None:
    if isinstance(error, OSError):
        return 2, _own_words(error)
    if isinstance(error, OutOfMemoryError):
        return 2, (
            f"the accelerator's memory is full; lower the batch size ({_one_line(str(error)).partition('. ')[0]})"
        )
    of_parser = any(frame.f_globals.get("__name__", "").startswith("jsonargparse.") for frame in _frames(error))
    if of_parser and isinstance(error, UnicodeDecodeError):
        return 2, f"a --config file cannot be read as text: {error}"
    return None


def _of_checkpoint(error: BaseException) -> tuple[int, str] | None:
    text = str(error)
    if isinstance(error, pickle.UnpicklingError):
        return 2, "a file holds other objects than tensors and plain data: it is not read, because that could run code"
    if isinstance(error, RuntimeError) and text.startswith("Error(s) in loading state_dict"):
        parts = [line.strip().rstrip(". ") for line in text.splitlines()[1:]]
        shown = "; ".join(part if len(part) < 200 else f"{part[:200]} …" for part in parts[:2])
        return 2, f"the checkpoint does not fit this model, it is of another task or of other settings: {shown}"
    if isinstance(error, ValueError) and text.startswith("loaded state dict"):
        return 2, f"the checkpoint does not fit this model's optimiser: {text}"
    if isinstance(error, KeyError) and "Trying to restore" in text:
        return 2, f"the run cannot be resumed from this checkpoint: {error.args[0]}"
    return None


def _of_library(errors: list[BaseException]) -> tuple[int, str] | None:
    """What Lightning, or an optimiser of torch, refuses in words of its own."""
    refused = [cause for cause in errors if _is_refusal(cause)]
    if not refused:
        return None
    text = _one_line(str(refused[-1])).rstrip(".")
    return 2, f"{text} ({TRACEBACK}=1 shows where)"


def _is_refusal(error: BaseException) -> bool:
    """Whether a line of these libraries says ``raise``: what merely happens there may be anybody's mistake."""
    if isinstance(error, MisconfigurationException):
        return bool(str(error))
    places = list(traceback.walk_tb(error.__traceback__))
    if not places or not str(error):
        return False
    frame, line = places[-1]
    module = frame.f_globals.get("__name__", "")
    raises = linecache.getline(frame.f_code.co_filename, line).strip().startswith("raise ")
    return raises and module.startswith(("lightning.", "torch.optim."))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _from_queue(error: BaseException) -> bool:
    """Whether it comes of taking a batch from a loader process: that may see the process die before torch does."""
    return isinstance(error, OSError | EOFError | RuntimeError | pickle.UnpicklingError) and any(
        frame.f_globals.get("__name__") == "multiprocessing.queues" for frame in _frames(error)
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

"""Random numbers that depend on a key alone, and the state of the global ones as plain tensors, for checkpoints."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

__all__ = ["random_state", "restore_random_state", "seed_of"]


def seed_of(*key: int) -> int:
    """A seed in [0, 2⁶⁴) for each key; those of different keys are as good as independent.

    Args:
        key: integers of at least 0, such as the run's seed, the epoch and the row.
    """
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


def random_state() -> dict[str, Tensor]:
    """The global random states of torch (also of this process's current GPU), NumPy and Python, as integers."""
    # What users draw from, and so what has to be kept.
    numpy_state = cast(tuple[Any, ...], np.random.get_state(legacy=True))  # noqa: NPY002
    version, python_state, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.array([*numpy_state[1], *numpy_state[2:4]], dtype=np.int64)),
        "numpy_gauss": torch.tensor([numpy_state[4]], dtype=torch.float64),
        "python": torch.tensor([version, *python_state], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Tensor]) -> None:
    """Set what :func:`random_state` gave.

    Args:
        state: its result; without "cuda" the GPU's state stays as it is.
    """
    # Copies: torch reads past the end of a state that is a row of a larger tensor, here that of all processes.
    torch.set_rng_state(state["torch"].to("cpu", copy=True))
    *keys, position, has_gauss = state["numpy"].tolist()
    key = np.array(keys, dtype=np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, state["numpy_gauss"].item()))  # noqa: NPY002
    version, *numbers = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(numbers), gauss[0] if gauss else None))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].to("cpu", copy=True))

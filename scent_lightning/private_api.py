"""Every private name of Lightning and torch that the package uses, each with its reason and what it gains.

Private names change without notice. Each is read here and nowhere else, and ``tests/test_private_api.py`` has a test
of each that fails where a version has renamed it or means something else by it. What only saves time is passed over
where its name is gone; what a result depends on raises one error, when it is needed, that names the version.

Not here, since they are methods that a class overrides in its own place: ``nn.Module._apply``, ``_save_to_state_dict``
and ``_load_from_state_dict`` (the table of ν is no buffer, and a state of another size is not an error), and
``LightningCLI._parse_ckpt_path`` (a checkpoint's hyperparameters do not override the command line), and argparse's
``HelpFormatter._get_help_string`` (what is said of an argument). They have their tests in the same file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import model_helpers
from torch import Tensor, nn
from torch.optim import Optimizer, optimizer
from torch.optim.lr_scheduler import LRScheduler

from scent_lightning.errors import InputError

__all__ = [
    "HOOK_NAME",
    "LINKED_TARGETS",
    "checkpoint_io_given",
    "entries",
    "forget_loaders",
    "forget_written",
    "is_watched",
    "keep_from_ddp",
    "load_loader_states",
    "loader_states",
    "loaders",
    "multiply",
    "norms",
    "parser_of",
    "replace_hyperparameters",
    "restricted_classmethod",
    "schedule_state",
    "set_last_rates",
    "skips_backward",
    "takes_own_records",
    "trainer_of",
    "unscales_itself",
    "write_last",
]

_Step = TypeVar("_Step")


def _check(library: Any, owner: Any, names: str, purpose: str) -> None:
    """Raise InputError unless ``owner`` has all of the attributes, named with spaces between them."""
    for name in names.split():
        if not hasattr(owner, name):
            raise InputError(
                f"{purpose} needs {type(owner).__name__}.{name}, which {library.__name__} {library.__version__} does "
                f"not have: install a version of {library.__name__} that this scent_lightning was tested with"
            )


# -------------------------------------------------------------------- modules

HOOK_NAME = "_current_fx_name"
"""The attribute of a LightningModule in which the Trainer notes the hook that runs, some fifty times a step.

A module that takes it without ``nn.Module``'s look through its parameters saves 5 % of a small step. Under another
name the attribute is set as any other.
"""

if TYPE_CHECKING:
    restricted_classmethod = classmethod
else:
    # A class method that says so where it is called on an instance, as Lightning's own load_from_checkpoint does:
    # the weights would be in what is returned, and not in the instance. Otherwise an ordinary one.
    restricted_classmethod = getattr(model_helpers, "_restricted_classmethod", classmethod)


def trainer_of(module: L.LightningModule) -> L.Trainer | None:
    """The Trainer that a module is attached to, or None.

    ``module.trainer`` raises where there is none, and under Fabric it is a stand-in without a state.
    """
    try:
        return module._trainer
    except AttributeError:
        pass
    try:
        return module.trainer
    except RuntimeError:
        return None


def replace_hyperparameters(module: L.LightningModule, values: Mapping[str, Any]) -> None:
    """Put ``values`` in the place of the hyperparameters of a module, for checkpoints and for loggers.

    ``module.hparams`` are those of checkpoints; loggers take a copy that ``save_hyperparameters`` made, of objects that
    are to be plain data.
    """
    values = dict(values)
    module.hparams.clear()
    module.hparams.update(values)
    module._hparams_initial = copy.deepcopy(module.hparams)  # type: ignore[assignment]


def keep_from_ddp(module: nn.Module, name: str) -> None:
    """Have DistributedDataParallel, torch's and Lightning's, leave a parameter alone.

    Its reducer cannot take row-sparse gradients on GPUs, and torch has no public way to say so.

    Args:
        module: what is to be wrapped.
        name: of the parameter.
    """
    names = list(getattr(module, "_ddp_params_and_buffers_to_ignore", []))
    if name not in names:
        module._ddp_params_and_buffers_to_ignore = [*names, name]  # type: ignore[assignment]


# -------------------------------------------------------------------- the fit


def skips_backward(trainer: L.Trainer) -> bool:
    """Whether this pass over the training set takes no steps.

    Lightning's averaging of weights makes one such pass in the end, for the statistics of batch norm alone.

    Without the name every pass counts as training.
    """
    try:
        return trainer.fit_loop._skip_backward
    except AttributeError:
        return False


def loader_states(loop: Any) -> list[Any]:
    """The states of a checkpoint's loaders that a resumed fit has not restored; empty where there are none.

    Lightning passes over them where ``configure_optimizers`` had the loader built, which is what asking for the number
    of steps does.

    Args:
        loop: ``trainer.fit_loop``.

    Raises:
        InputError: the fit is resumed, and this Lightning keeps them elsewhere.
    """
    if loop.restarting:
        _check(L, loop, "_combined_loader_states_to_load", "resuming within an epoch")
    return cast(list[Any], getattr(loop, "_combined_loader_states_to_load", []))


def load_loader_states(loop: Any) -> None:
    """Restore what :func:`loader_states` gives, and start the loaders there.

    Raises:
        InputError: this Lightning has another way to do so.
    """
    _check(L, loop, "_load_combined_loader_states _data_fetcher", "resuming within an epoch")
    loop._load_combined_loader_states()
    iter(loop._data_fetcher)


def loaders(loop: Any) -> list[Any]:
    """The loaders of a fit, each on its own; ``trainer.train_dataloader`` has them nested as the user gave them.

    Without the name none is known, and a run that is resumed with another batch size counts its place in steps.
    """
    combined = getattr(loop, "_combined_loader", None)
    return [] if combined is None else list(combined.flattened)


def forget_loaders(loop: Any) -> None:
    """Have the Trainer build the loaders of a fit and of its validation anew: they would go on where they stopped.

    Raises:
        InputError: this Lightning keeps them elsewhere.
    """
    _check(L, loop, "_combined_loader", "starting the loaders anew")
    loop._combined_loader = loop.epoch_loop.val_loop._combined_loader = None


# -------------------------------------------------------------------- checkpoints


def write_last(callback: ModelCheckpoint, trainer: L.Trainer) -> bool:
    """Write ``last.ckpt`` now, and return whether it was: ModelCheckpoint's hooks do so at times of their own.

    Raises:
        InputError: this Lightning's ModelCheckpoint has other methods.
    """
    names = "_should_skip_saving_checkpoint _save_last_checkpoint _monitor_candidates"
    _check(L, callback, names, "writing last.ckpt")
    if callback._should_skip_saving_checkpoint(trainer):
        return False
    callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
    return True


def forget_written(callback: ModelCheckpoint) -> None:
    """Have the next writing not be passed over: ModelCheckpoint writes each step once, whatever the run."""
    callback._last_global_step_saved = -1


def checkpoint_io_given(strategy: Any) -> Any:
    """The way of checkpoints that a strategy was built with, or None; ``strategy.checkpoint_io`` makes one itself."""
    return getattr(strategy, "_checkpoint_io", None)


# -------------------------------------------------------------------- optimisers


def takes_own_records(step: _Step) -> _Step:
    """Mark the ``step`` of an optimiser that calls hooks and profiler itself, where :func:`is_watched`.

    torch wraps the step of every class without the mark in hooks and a record for its profiler: 0.1 ms where there is
    neither, of 1.3 ms that a step of extreme classification takes.
    """
    step.hooked = True  # type: ignore[attr-defined]
    return step


# What torch has under another name is taken to be in use: a step is then recorded as torch's own are.
_IN_USE: Mapping[int, Any] = {0: None}
_GLOBAL_BEFORE: Mapping[int, Any] = getattr(optimizer, "_global_optimizer_pre_hooks", _IN_USE)
_GLOBAL_AFTER: Mapping[int, Any] = getattr(optimizer, "_global_optimizer_post_hooks", _IN_USE)


def is_watched(of: Optimizer) -> bool:
    """Whether hooks, or torch's profiler, look at the steps of an optimiser."""
    try:
        hooks = (of._optimizer_step_pre_hooks, of._optimizer_step_post_hooks, _GLOBAL_BEFORE, _GLOBAL_AFTER)
        return any(hooks) or torch.autograd.profiler._is_profiler_enabled
    except AttributeError:
        return True


def schedule_state(schedule: LRScheduler) -> dict[str, Any]:
    """What a schedule of learning rates has counted and set last, as plain data.

    Its own ``state_dict`` has all its attributes, here functions and the Trainer.
    """
    state = vars(schedule)
    return {name: state[name] for name in ("_step_count", "_last_lr") if name in state}


def set_last_rates(schedule: LRScheduler, rates: list[Any]) -> None:
    """Tell a schedule which rates are set, which ``get_last_lr`` gives."""
    schedule._last_lr = rates


def entries(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse tensor as they are, repeats included.

    ``indices()`` and ``values()`` refuse one that is not coalesced, and autograd forgets that a gradient is: to do so
    again takes longer than a step of the optimiser.
    """
    return gradient._indices(), gradient._values()


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each tensor, a scalar in float32 or better; of many on a GPU in one launch.

    torch has this for its own clipping of gradients, where the norms of half precision overflow.
    """
    if _together(tensors) and hasattr(torch, "_foreach_norm"):
        return list(torch._foreach_norm([t.float() if t.itemsize < 4 else t for t in tensors]))
    norm = torch.linalg.vector_norm
    return [norm(t) if t.itemsize >= 4 else norm(t, dtype=torch.float32) for t in tensors]


def multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply tensors by a number in place; many on a GPU in one launch."""
    if _together(tensors) and hasattr(torch, "_foreach_mul_"):
        torch._foreach_mul_(tensors, factor)
        return
    by: dict[torch.dtype, Tensor | float] = {}
    for tensor in tensors:
        kind = tensor.dtype
        if kind not in by:
            # On the CPU torch takes a third of the time to multiply by a tensor that it takes by a number.
            plain = tensor.itemsize < 4 or tensor.device.type != "cpu"
            by[kind] = factor if plain else torch.full((), factor, dtype=kind)
        tensor.mul_(by[kind])


def _together(tensors: list[Tensor]) -> bool:
    return len(tensors) > 1 and tensors[0].device.type != "cpu"


def unscales_itself(of: Optimizer) -> bool:
    """Whether an optimiser divides by a gradient scaler's factor within its step, as torch's fused ones do."""
    return bool(getattr(of, "_step_supports_amp_scaling", False))


# -------------------------------------------------------------------- the command line

LINKED_TARGETS = "linked_targets"
"""The argument of jsonargparse's ``add_class_arguments`` for arguments of a class that need not be given.

It is what its own links set, which are made before the class is known; sizes of a task are linked after.
"""


def parser_of(cli: Any) -> Any:
    """The parser of the subcommand that runs, which the sizes of the task chosen are linked in.

    Args:
        cli: a LightningCLI.

    Raises:
        InputError: this version of Lightning keeps it under another name.
    """
    _check(L, cli, "_parser", "the command line's link of sizes")
    return cli._parser(cli.subcommand)

"""What every dual update has in common."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scent_lightning import functional
from scent_lightning.errors import InputError
from scent_lightning.updates.step_size import StepSizeRule
from scent_lightning.validation import checked_number

__all__ = ["DualUpdate"]


def _definer(kind: type, name: str) -> type:
    """The class that ``kind`` has an attribute from."""
    return next(each for each in kind.__mro__ if name in vars(each))


def _shortest_path(kind: type) -> str:
    """Import path of a class: of the outermost package that has it under its name, so that it outlives its file."""
    parts = kind.__module__.split(".")
    for length in range(1, len(parts)):
        outer = ".".join(parts[:length])
        if getattr(sys.modules.get(outer), kind.__qualname__, None) is kind:
            return f"{outer}.{kind.__qualname__}"
    return f"{kind.__module__}.{kind.__qualname__}"


class DualUpdate:
    r"""Base class of the dual updates.

    A subclass implements :meth:`step_from_log_mean` where the log-mean-exp of the batch is all it needs,
    :meth:`step_from_scores` where it needs the scores themselves, or :meth:`step_with_previous` where it needs the
    log-mean-exp at the weights before as well; guard, precision and rows without a sample are taken
    care of here. :class:`~scent_lightning.updates.schedules.ScheduledUpdate` has a step size that follows a schedule.
    Give every argument of ``__init__`` an attribute of the same name: that is how an update is printed and written into
    a checkpoint (as plain data, never pickled).

    Args:
        max_log_weight: the guard: the new ν is raised to at least :math:`\ell` − ``max_log_weight``, so that no
            anchor's mean weight :math:`e^{\ell - \nu}` exceeds :math:`e^{max\_log\_weight}`. None is the published
            method.

    Raises:
        InputError: an argument out of its range, naming the argument, the value and what is allowed.

    Example:
        >>> import torch
        >>> class HalfWay(DualUpdate):
        ...     def step_from_log_mean(self, nu, log_mean, progress=0.0):
        ...         return (nu + log_mean) / 2
        >>> HalfWay().step(torch.zeros(1), torch.full((1, 4), 3.0))
        tensor([1.5000])
    """

    def __init__(self, max_log_weight: float | None = None) -> None:
        needs_more = self.needs_scores or self.needs_previous_scores
        if not needs_more and type(self).step_from_log_mean is DualUpdate.step_from_log_mean:
            raise TypeError(f"{type(self).__name__} must implement step_from_log_mean or step_from_scores")
        self.max_log_weight = checked_number("max_log_weight", max_log_weight, least=0, infinite=True, or_none=True)

    @property
    def needs_scores(self) -> bool:
        """Whether a step does more with the scores than take their log-mean-exp."""
        kind = type(self)
        return kind.step_from_scores is not DualUpdate.step_from_scores or kind.step is not DualUpdate.step

    @property
    def needs_previous_scores(self) -> bool:
        """Whether a step needs the scores of the same samples at the weights before the last optimiser step, too."""
        return type(self).step_with_previous is not DualUpdate.step_with_previous

    def step(
        self,
        nu: Tensor,
        scores: Tensor,
        mask: Tensor | None = None,
        progress: float = 0.0,
        previous_scores: Tensor | None = None,
    ) -> Tensor:
        """New dual variables from a batch of scores.

        Log-mean-exp, then :meth:`step_from_log_mean`, :meth:`step_from_scores` or :meth:`step_with_previous`, then the
        guard.

        Args:
            nu: current dual variables, shape ``(B,)``.
            scores: shape ``(B, m)``, any floating dtype; raised to float32 before any exponential.
            mask: bool, shape ``(B, m)``, True where a sample counts; None means all do.
            progress: fraction of the run that is done, in [0, 1], for the schedule.
            previous_scores: scores of the same samples at the previous weights, shape ``(B, m)``, for an update that
                needs them (:attr:`needs_previous_scores`); ignored by the others.

        Returns:
            Shape ``(B,)``, float32, detached. A row without a valid sample keeps its ν. Not finite where the
            step overflows: the table raises :class:`~scent_lightning.errors.DualDivergenceError` on that.

        Raises:
            InputError: ``previous_scores`` are missing.
        """
        log_mean = functional.log_mean_exp(scores, mask)
        if self.needs_previous_scores:
            if previous_scores is None:
                raise InputError(
                    f"{self!r} needs previous_scores, the scores of the same samples at the weights before"
                )
            moved = self.step_with_previous(nu, log_mean, functional.log_mean_exp(previous_scores, mask), progress)
        elif self.needs_scores:
            moved = self.step_from_scores(nu, functional.at_least_float32(scores.detach()), mask, progress)
        else:
            moved = self.step_from_log_mean(nu, log_mean, progress)
        moved = self.guard(moved, log_mean)
        return torch.where(log_mean == -math.inf, functional.wide(nu), functional.wide(moved)).float()

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:
        """New dual variables from the log-mean-exp of the scores, without the guard.

        Args:
            nu: current dual variables, shape ``(B,)``.
            log_mean: log-mean-exp of the batch's scores, shape ``(B,)``.
            progress: fraction of the run that is done, in [0, 1], for the schedule.

        Returns:
            Shape ``(B,)``, in float32 or better.

        Raises:
            NotImplementedError: the update needs the scores themselves (see :attr:`needs_scores`).
        """
        raise NotImplementedError(f"{type(self).__name__} needs the scores, not only their log-mean-exp: call step")

    def step_with_previous(self, nu: Tensor, log_mean: Tensor, previous: Tensor, progress: float = 0.0) -> Tensor:
        """New dual variables from the log-mean-exp of the scores now and at the previous weights, without the guard.

        For an update that implements this in place of :meth:`step_from_log_mean`.

        Args:
            nu: current dual variables, shape ``(B,)``.
            log_mean: log-mean-exp of the batch's scores, shape ``(B,)``.
            previous: that of the same samples at the weights before the last optimiser step, shape ``(B,)``;
                ``log_mean`` for an anchor that was never seen, or that has had the step's change already.
            progress: fraction of the run that is done, in [0, 1], for the schedule.

        Returns:
            Shape ``(B,)``, in float32 or better.
        """
        return self.step_from_log_mean(nu, log_mean, progress)

    def step_from_scores(self, nu: Tensor, scores: Tensor, mask: Tensor | None = None, progress: float = 0.0) -> Tensor:
        """New dual variables from the scores themselves, without the guard, for an update that ℓ is not enough for.

        Guard, half precision and rows without a valid sample are taken care of elsewhere.

        Args:
            nu: current dual variables, shape ``(B,)``.
            scores: shape ``(B, m)``, in float32 or better, detached; anything where the mask is False, NaN included. A
                score of −∞ is a sample of weight 0.
            mask: bool, shape ``(B, m)``, True where a sample counts; None means all do.
            progress: fraction of the run that is done, in [0, 1], for the schedule.

        Returns:
            Shape ``(B,)``, in float32 or better; anything for a row without a valid sample.
        """
        if type(self).step is DualUpdate.step:
            raise NotImplementedError(f"{type(self).__name__} needs the log-mean-exp of the scores alone")
        bare = copy.copy(self)  # a class that overrides step as a whole, its guard included
        bare.max_log_weight = None
        return bare.step(nu, scores, mask, progress)

    def step_of_one(self, nu: float, log_mean: float, progress: float = 0.0) -> float | None:
        """:meth:`step_from_log_mean` for a single anchor in plain numbers, or None where there is no such form.

        An optional shortcut: with one anchor (a whole training set, say) the numbers are few and calls are what costs.
        A class that overrides what it is a shortcut for has to bring its own (:attr:`has_step_of_one`).
        """
        return None

    @property
    def has_step_of_one(self) -> bool:
        """Whether :meth:`step_of_one` stands for this very update, and not for one that it was derived from."""
        kind, own = type(self), vars(self)
        shortcut = _definer(kind, "step_of_one")
        stands_for = ("step", "step_from_log_mean", "step_from_scores", "step_with_previous", "guard", "step_of_one")
        return not any(name in own or not issubclass(shortcut, _definer(kind, name)) for name in stands_for)

    @property
    def needs_progress(self) -> bool:
        """Whether a step size changes as the run goes on."""
        if (rule := self.step_size_rule(1)) is not None:
            return rule.needs_progress
        return self.step_sizes(0.0) != self.step_sizes(1.0)

    def guard(self, nu: Tensor, log_mean: Tensor) -> Tensor:
        r"""Raise ν to at least :math:`\ell` − ``max_log_weight``; ν itself where ``max_log_weight`` is None."""
        return nu if self.max_log_weight is None else functional.guard(nu, log_mean, self.max_log_weight)

    def objective(self, nu: Tensor, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Dual objective of each anchor, shape ``(B,)``, with ν constant; 0 for a row without a valid sample.

        See :func:`scent_lightning.functional.exponential_objective`.
        """
        return functional.exponential_objective(nu, scores, mask)

    @property
    def has_exponential_objective(self) -> bool:
        """Whether the objective is the exponential one, whose gradient is known from ℓ and ν alone."""
        return type(self).objective is DualUpdate.objective

    def step_size_rule(self, num_anchors: int) -> StepSizeRule | None:
        """What finds the step size during the run, or None where it is given.

        A table asks once, lets the rule observe every step, and steps by a copy of the update with what the rule says.

        Args:
            num_anchors: number of rows n of the table.
        """
        return None

    def step_sizes(self, progress: float = 0.0) -> dict[str, float]:
        """Scheduled value of each step size at ``progress``, by its name."""
        return {}

    def statistics(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> dict[str, Tensor]:
        """Quantities of the update itself that are worth watching, by name, from ν before the step and ℓ."""
        return {}

    def config(self) -> dict[str, Any]:
        """Class path and arguments as plain data, the form in which checkpoints and YAML files hold an update.

        Example:
            >>> from scent_lightning.updates import SOX
            >>> SOX(gamma=0.5).config()["init_args"]["gamma"]
            0.5
        """
        arguments = {}
        for name, parameter in inspect.signature(type(self)).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if not hasattr(self, name):
                raise TypeError(f"{type(self).__name__} must keep its argument {name!r} as an attribute of that name")
            arguments[name] = getattr(self, name)
        return {"class_path": _shortest_path(type(self)), "init_args": arguments}

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> DualUpdate:
        """Build an update from :meth:`config`'s form.

        A checkpoint holds this form, and loading one must not run code that its author chose: no module is imported
        but this package's. One of your own must be imported already.

        Raises:
            InputError: the class path is missing, its module is not imported, or it is not a dual update.
        """
        path = config.get("class_path", "")
        module, _, name = str(path).rpartition(".")
        module = module or "scent_lightning.updates"
        if module.split(".")[0] != "scent_lightning" and module not in sys.modules:
            raise InputError(
                f"class_path {path!r} of a dual update is in a module that is not imported, and a checkpoint or a "
                f"configuration does not import it: import {module} first, or pass the update itself as dual"
            )
        try:
            found = getattr(sys.modules.get(module) or importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise InputError(f"no dual update at class_path {path!r}: {error}") from error
        if not (inspect.isclass(found) and issubclass(found, DualUpdate)):
            raise InputError(f"class_path {path!r} is not a subclass of DualUpdate")
        return found(**dict(config.get("init_args") or {}))

    def __repr__(self) -> str:
        parameters = inspect.signature(type(self)).parameters
        shown = [
            f"{name}={getattr(self, name)!r}"
            for name, parameter in parameters.items()
            if hasattr(self, name) and getattr(self, name) != parameter.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

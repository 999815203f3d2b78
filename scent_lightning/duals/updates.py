r"""The dual updates: how the dual variable ν of an anchor moves when a batch of its scores comes in.

Each is a small stateless object over the functions of :mod:`scent_lightning.functional`. Subclass :class:`DualUpdate`
to add your own; it is then selectable from the command line by its import path.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from scent_lightning import functional
from scent_lightning.duals.schedules import SCHEDULES, Schedule, scheduled, scheduled_log
from scent_lightning.errors import InputError

__all__ = ["ASGD", "BSGD", "SCENT", "SOX", "DualUpdate", "SoftplusASGD", "UMax"]


def _number(name: str, value: float, allowed: str, ok: bool) -> float:
    """Return ``value`` as a float if it is one and ``ok``; otherwise say what is allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or not ok:
        raise InputError(f"{name} must be {allowed}, got {value!r}")
    return float(value)


def _definer(kind: type, name: str) -> type:
    """The class that ``kind`` has an attribute from."""
    return next(each for each in kind.__mro__ if name in vars(each))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


class DualUpdate:
    r"""Base class of the dual updates.

    A subclass implements :meth:`step_from_log_mean` where the log-mean-exp of the batch is all it needs, and overrides
    :meth:`step` where it needs the scores themselves. Give every argument of ``__init__`` an attribute of the same
    name: that is how an update is printed and written into a checkpoint (as plain data, never pickled).

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
        if type(self).step is DualUpdate.step and type(self).step_from_log_mean is DualUpdate.step_from_log_mean:
            raise TypeError(f"{type(self).__name__} must implement step_from_log_mean (or override step)")
        self.max_log_weight = max_log_weight
        if max_log_weight is not None:
            ok = isinstance(max_log_weight, (int, float)) and max_log_weight >= 0
            self.max_log_weight = _number("max_log_weight", max_log_weight, "None or a number of at least 0", ok)

    @property
    def needs_scores(self) -> bool:
        """Whether :meth:`step` does more with the scores than take their log-mean-exp."""
        return type(self).step is not DualUpdate.step

    def step(self, nu: Tensor, scores: Tensor, mask: Tensor | None = None, progress: float = 0.0) -> Tensor:
        """New dual variables from a batch of scores: log-mean-exp, :meth:`step_from_log_mean`, guard.

        Args:
            nu: current dual variables, shape ``(B,)``.
            scores: shape ``(B, m)``, any floating dtype; raised to float32 before any exponential.
            mask: bool, shape ``(B, m)``, True where a sample counts; None means all do.
            progress: fraction of the run that is done, in [0, 1], for the schedule.

        Returns:
            Shape ``(B,)``, float32, detached. A row without a valid sample keeps its ν. Not finite where the
            step overflows: the table raises :class:`~scent_lightning.errors.DualDivergenceError` on that.
        """
        log_mean = functional.log_mean_exp(scores, mask)
        moved = self.guard(self.step_from_log_mean(nu, log_mean, progress), log_mean)
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
        stands_for = ("step", "step_from_log_mean", "guard", "step_of_one")
        return not any(name in own or not issubclass(shortcut, _definer(kind, name)) for name in stands_for)

    @property
    def needs_progress(self) -> bool:
        """Whether a step size changes as the run goes on."""
        return self.is_auto or self.step_sizes(0.0) != self.step_sizes(1.0)

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

    @property
    def is_auto(self) -> bool:
        """Whether the table has to find the step size: it sets ``log_alpha`` of a copy to a number at each step."""
        return False

    def step_sizes(self, progress: float = 0.0) -> dict[str, float]:
        """Scheduled value of each step size at ``progress``, by its name."""
        return {}

    def statistics(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> dict[str, Tensor]:
        """Quantities of the update itself that are worth watching, by name, from ν before the step and ℓ."""
        return {}

    def config(self) -> dict[str, Any]:
        """Class path and arguments as plain data, the form in which checkpoints and YAML files hold an update.

        Example:
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
        return {"class_path": f"{type(self).__module__}.{type(self).__qualname__}", "init_args": arguments}

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
        module = module or "scent_lightning.duals"
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


class _ScheduledUpdate(DualUpdate):
    """An update with a step size that follows a schedule."""

    def __init__(self, schedule: Schedule, final: float | None, max_log_weight: float | None) -> None:
        super().__init__(max_log_weight=max_log_weight)
        if schedule not in SCHEDULES:
            raise InputError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
        self.schedule = schedule
        self.final = final


class BSGD(DualUpdate):
    r"""Biased SGD: ν is the batch's own log-mean-exp, :math:`\nu \leftarrow \ell`.

    The usual mini-batch softmax, and OpenCLIP's loss. No memory between batches, hence a bias that does not go away
    (Hu et al. 2020; Wei et al. 2026 show it is SCENT with an infinite step size).

    Args:
        max_log_weight: accepted as for every update; without effect here, since ν = ℓ.

    Example:
        >>> import torch
        >>> BSGD().step(torch.zeros(1), torch.full((1, 4), 3.0))
        tensor([3.])
    """

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:  # noqa: D102
        return functional.wide(log_mean).clone()

    def step_of_one(self, nu: float, log_mean: float, progress: float = 0.0) -> float:  # noqa: D102
        return log_mean


class SCENT(_ScheduledUpdate):
    r"""SCENT's stochastic proximal mirror descent step (Wei et al. 2026).

    .. math:: \nu \leftarrow \nu + \log(1 + \alpha e^{\ell}) - \log(1 + \alpha e^{\nu})

    A moving average of :math:`e^\nu` whose factor, the effective γ = sigmoid(log α + ν), is small where ν is small.
    A good start is log α ≈ −ν* − c, with ν* the value ν settles at (watch it in TensorBoard) and c from 0 to 4. "auto"
    finds it during the run: :class:`~scent_lightning.duals.auto_step_size.AutoStepSize`.

    Args:
        log_alpha: natural logarithm of the step size α; from −60 to 60 in real use, any size is exact. "auto": the
            table finds it, by the progress of the run. Without a Trainer you have to tell it the progress.
        schedule: "constant" (published) or "cosine", which takes α from exp(log_alpha) to exp(final). Not for "auto".
        final: logarithm of α at the end of a cosine schedule; None means that α goes to 0.
        max_log_weight: the guard (see :class:`DualUpdate`); 1 to 5 where training is unstable, None as published. With
            "auto", None is 1 to 4, by how often an anchor was seen.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> import torch
        >>> update = SCENT(log_alpha=0.0)
        >>> update.step(torch.zeros(1), torch.full((1, 4), 1.0))
        tensor([0.6201])
    """

    def __init__(
        self,
        log_alpha: float | Literal["auto"] = "auto",
        schedule: Schedule = "constant",
        final: float | None = None,
        max_log_weight: float | None = None,
    ) -> None:
        super().__init__(schedule, final, max_log_weight)
        allowed = 'a number or "auto"'
        self.log_alpha = log_alpha if log_alpha == "auto" else _number("log_alpha", log_alpha, allowed, True)
        if final is not None:
            self.final = _number("final", final, "None or a number (the logarithm of the last step size)", True)

    @property
    def is_auto(self) -> bool:  # noqa: D102
        return self.log_alpha == "auto"

    def _log_alpha_at(self, progress: float) -> float:
        if isinstance(self.log_alpha, str):
            raise InputError('log_alpha="auto" is found by the table it belongs to: step by a DualVariable')
        return scheduled_log(self.schedule, self.log_alpha, -math.inf if self.final is None else self.final, progress)

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:  # noqa: D102
        return functional.proximal_mirror_descent_step(nu, log_mean, self._log_alpha_at(progress))

    def step_of_one(self, nu: float, log_mean: float, progress: float = 0.0) -> float:  # noqa: D102
        log_alpha = self._log_alpha_at(progress)
        if math.isinf(log_alpha):
            return log_mean if log_alpha > 0 else nu
        return nu + (_softplus(log_alpha + log_mean) - _softplus(log_alpha + nu))

    def step_sizes(self, progress: float = 0.0) -> dict[str, float]:  # noqa: D102
        return {"log_alpha": self._log_alpha_at(progress)}

    def statistics(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> dict[str, Tensor]:
        """Mean, smallest and largest effective γ = sigmoid(log α + ν) of the batch."""
        gamma = torch.sigmoid(functional.wide(nu) + self._log_alpha_at(progress))
        return {
            "effective_gamma": gamma.mean(),
            "effective_gamma_min": gamma.amin(),
            "effective_gamma_max": gamma.amax(),
        }


class SOX(_ScheduledUpdate):
    r"""Moving average of the inner function (Wang & Yang 2022; FastCLIP's update; SCGD where there is one anchor).

    .. math:: \nu \leftarrow \log((1 - \gamma) e^{\nu} + \gamma e^{\ell})

    Args:
        gamma: weight of the batch, in [0, 1]; 1 is BSGD, 0 leaves ν alone.
        schedule: "constant" or "cosine". The cosine goes from 1 to ``gamma``, as published, unless ``final`` is set.
        final: with a cosine schedule, γ goes from ``gamma`` to ``final`` instead.
        max_log_weight: the guard (see :class:`DualUpdate`); None is the published method.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> import torch
        >>> SOX(gamma=0.5).step(torch.zeros(1), torch.full((1, 4), 1.0))
        tensor([0.6201])
    """

    def __init__(
        self,
        gamma: float,
        schedule: Schedule = "constant",
        final: float | None = None,
        max_log_weight: float | None = None,
    ) -> None:
        super().__init__(schedule, final, max_log_weight)
        self.gamma = _number("gamma", gamma, "in [0, 1]", isinstance(gamma, (int, float)) and 0 <= gamma <= 1)
        if final is not None:
            ok = isinstance(final, (int, float)) and 0 <= final <= 1
            self.final = _number("final", final, "None or in [0, 1]", ok)

    def _gamma_at(self, progress: float) -> float:
        start, end = (1.0, self.gamma) if self.final is None else (self.gamma, self.final)
        return self.gamma if self.schedule == "constant" else scheduled(self.schedule, start, end, progress)

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:  # noqa: D102
        return functional.sox_step(nu, log_mean, self._gamma_at(progress))

    def step_sizes(self, progress: float = 0.0) -> dict[str, float]:  # noqa: D102
        return {"gamma": self._gamma_at(progress)}


class ASGD(_ScheduledUpdate):
    r"""Alternating SGD on the min–min objective: :math:`\nu \leftarrow \nu - \alpha (1 - e^{\ell - \nu})`.

    Overflows where scores vary by more than a few tens: then a
    :class:`~scent_lightning.errors.DualDivergenceError` is raised.

    Args:
        alpha: step size, above 0.
        schedule: "constant", or "cosine" (published) from ``alpha`` to ``final``.
        final: step size at the end of a cosine schedule; None means 0.
        max_log_weight: the guard (see :class:`DualUpdate`); None is the published method.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> import torch
        >>> ASGD(alpha=0.5).step(torch.zeros(1), torch.full((1, 4), 1.0))
        tensor([0.8591])
    """

    def __init__(
        self,
        alpha: float,
        schedule: Schedule = "constant",
        final: float | None = None,
        max_log_weight: float | None = None,
    ) -> None:
        super().__init__(schedule, final, max_log_weight)
        ok = isinstance(alpha, (int, float)) and 0 < alpha < math.inf
        self.alpha = _number("alpha", alpha, "a finite number above 0", ok)
        if final is not None:
            ok = isinstance(final, (int, float)) and 0 <= final < math.inf
            self.final = _number("final", final, "None or a finite number of at least 0", ok)

    def _alpha_at(self, progress: float) -> float:
        return scheduled(self.schedule, self.alpha, self.final or 0.0, progress)

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:  # noqa: D102
        return functional.asgd_step(nu, log_mean, self._alpha_at(progress))

    def step_sizes(self, progress: float = 0.0) -> dict[str, float]:  # noqa: D102
        return {"alpha": self._alpha_at(progress)}


class UMax(ASGD):
    r"""U-max (Fagan & Iyengar 2018): the ASGD step, reset to ℓ where ν falls more than δ below ℓ.

    Args:
        alpha: step size, above 0.
        delta: how far below ℓ ν may lie before it is reset to ℓ, at least 0.
        schedule: "constant", or "cosine" (published) from ``alpha`` to ``final``.
        final: step size at the end of a cosine schedule; None means 0.
        max_log_weight: the guard (see :class:`DualUpdate`); None is the published method.
        compare: which ν is compared with ℓ − δ: "new", the result of the step, or "old", the ν before it. The "old"
            comparison also prevents the step from overshooting where ν lies far below ℓ, and is the one that comes
            near the figures published for robust regression.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> import torch
        >>> UMax(alpha=0.5, delta=1.0).step(torch.zeros(1), torch.full((1, 4), -1.0))
        tensor([-0.3161])
    """

    def __init__(
        self,
        alpha: float,
        delta: float,
        schedule: Schedule = "constant",
        final: float | None = None,
        max_log_weight: float | None = None,
        compare: Literal["new", "old"] = "new",
    ) -> None:
        super().__init__(alpha, schedule, final, max_log_weight)
        if compare not in ("new", "old"):
            raise InputError(f"compare must be 'new' or 'old', got {compare!r}")
        self.compare = compare
        self.delta = _number("delta", delta, "at least 0", isinstance(delta, (int, float)) and delta >= 0)

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:  # noqa: D102
        return functional.umax_step(nu, log_mean, self._alpha_at(progress), self.delta, self.compare)


class SoftplusASGD(ASGD):
    r"""ASGD on the softplus approximation (Gladin et al. 2025), which replaces exp(x) by softplus(x + log ρ)/ρ.

    .. math:: \nu \leftarrow \nu - \alpha \Bigl(1 - \frac{1}{m} \sum_j \frac{\sigma(S_j - \nu + \log \rho)}{\rho}\Bigr)

    Args:
        alpha: step size, above 0.
        rho: how strongly the exponential is truncated, above 0; exact as it goes to 0. Published: 1e-3.
        schedule: "constant", or "cosine" (published) from ``alpha`` to ``final``.
        final: step size at the end of a cosine schedule; None means 0.
        max_log_weight: the guard (see :class:`DualUpdate`); None is the published method.

    Raises:
        InputError: an argument out of its range.

    Example:
        >>> import torch
        >>> SoftplusASGD(alpha=0.5, rho=1e-3).step(torch.zeros(1), torch.full((1, 4), 1.0))
        tensor([0.8555])
    """

    def __init__(
        self,
        alpha: float,
        rho: float,
        schedule: Schedule = "constant",
        final: float | None = None,
        max_log_weight: float | None = None,
    ) -> None:
        super().__init__(alpha, schedule, final, max_log_weight)
        ok = isinstance(rho, (int, float)) and 0 < rho < math.inf
        self.rho = _number("rho", rho, "a finite number above 0", ok)

    def step(self, nu: Tensor, scores: Tensor, mask: Tensor | None = None, progress: float = 0.0) -> Tensor:  # noqa: D102
        moved = functional.softplus_asgd_step(nu, scores, self._alpha_at(progress), self.rho, mask)
        if self.max_log_weight is None:
            return moved.float()
        return self.guard(moved, functional.log_mean_exp(scores, mask)).float()

    def step_from_log_mean(self, nu: Tensor, log_mean: Tensor, progress: float = 0.0) -> Tensor:
        """Raise NotImplementedError: the softplus step needs the scores themselves."""
        return DualUpdate.step_from_log_mean(self, nu, log_mean, progress)

    def objective(self, nu: Tensor, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Softplus dual objective (see :func:`scent_lightning.functional.softplus_objective`), shape ``(B,)``."""
        return functional.softplus_objective(nu, scores, self.rho, mask)

"""The mixin that gives a LightningModule its dual variables."""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from typing import Any, cast

import lightning as L
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from typing_extensions import Self

from scent_lightning.compiling import outside_graphs
from scent_lightning.duals import step
from scent_lightning.duals.previous import PreviousWeightsMixin
from scent_lightning.duals.resume import Resumption, given_as_objects, plain_hyperparameters, rows_changed
from scent_lightning.duals.samples import Samples
from scent_lightning.duals.separate import samples_of_step
from scent_lightning.duals.table import IfChanged, Placement
from scent_lightning.duals.variable import DualVariable
from scent_lightning.duals.visits import warn_of_places_in_batches
from scent_lightning.duals.weight_step import (
    ExponentialPart,
    WeightStep,
    WeightStepRule,
    check_training,
    checked_weight_step,
    proximal_gradients,
    scales,
    takes_proximal,
)
from scent_lightning.errors import InputError
from scent_lightning.importing import named_by, read_anywhere, without_imports_of
from scent_lightning.private_api import (
    HOOK_NAME,
    replace_hyperparameters,
    restricted_classmethod,
    trainer_of,
)
from scent_lightning.progress import check_progress, run_progress
from scent_lightning.summary import announce
from scent_lightning.updates import DualUpdate

__all__ = ["DualVariableMixin"]


class DualVariableMixin(PreviousWeightsMixin):
    """Put dual variables into a LightningModule: ``class MyTask(DualVariableMixin, L.LightningModule)``.

    A subclass calls :meth:`add_dual` in ``__init__`` and :meth:`entropic_risk` in ``training_step``; the data module
    yields the dataset index of every row. Taken care of here: the progress of the run for scheduled step sizes, float32
    whatever the trainer's precision, the state dict, the exchange between processes, reading without writing outside
    training, and hyperparameters that hold a dual update as plain data. A checkpoint also holds the random states of
    every process, and a run that is resumed from it continues with them. At the start of a fit the number of anchors is
    said, and what the data module has read: what its method ``data_summary``, if it has one, returns as words by name.

    Attributes:
        duals: maps the name of each dual to its :class:`DualVariable`.
        if_changed_data: what becomes of ν where a checkpoint has another number of anchors: "error" (evaluation works,
            training stops), "grow" (rows were appended; they start unvisited) or "reset" (all start unvisited).
        weight_step: "gradient" leaves the gradients alone; "proximal" multiplies them before each step of SGD, so that
            no batch moves the weights further than its exponential allows: see
            :mod:`scent_lightning.duals.weight_step`. A class or an instance may set it. A module that overrides
            ``on_before_optimizer_step`` calls that of its base; clipping comes after it.
        last_weight_step: what the last proximal step was; None before the first, and where there was none.

    Example:
        >>> import lightning as L
        >>> import torch
        >>> from scent_lightning.duals import SCENT, DualVariableMixin
        >>> class Softmax(DualVariableMixin, L.LightningModule):
        ...     def __init__(self, num_anchors):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(4, 3)
        ...         self.add_dual("nu", num_anchors, SCENT(log_alpha=0.0))
        ...     def training_step(self, batch, batch_idx):
        ...         features, labels, index = batch
        ...         logits = self.linear(features)
        ...         return self.entropic_risk("nu", logits - logits.gather(1, labels[:, None]), index)
        >>> model = Softmax(num_anchors=8)
        >>> loss = model.training_step((torch.randn(2, 4), torch.tensor([0, 2]), torch.tensor([5, 1])), 0)
        >>> int(model.duals["nu"].visited.sum())
        2
    """

    weight_step: WeightStepRule = "gradient"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.duals = nn.ModuleDict()
        self.if_changed_data: IfChanged = "error"
        self._exponential_part = ExponentialPart()
        self.last_weight_step: WeightStep | None = None
        self._resumption = Resumption(self._exponential_part, self._previous_weights)
        self._progress_told: float | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        # The Trainer notes the name of every hook, and nn.Module looks through its parameters at each.
        if name == HOOK_NAME:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def add_dual(
        self, name: str, num_anchors: int, update: DualUpdate | dict[str, Any], placement: Placement = "module"
    ) -> DualVariable:
        """Add a table of dual variables.

        Args:
            name: a Python identifier, unique in this module; it appears in TensorBoard tags and in the state dict.
            num_anchors: number of rows n of the training set.
            update: the dual update, as an object or in the form of :meth:`DualUpdate.config`.
            placement: "module" keeps the table on the module's device, "cpu" in main memory.

        Returns:
            The table, also found as ``self.duals[name]``.

        Raises:
            InputError: the name is taken or no identifier, or ``num_anchors``, ``update`` or ``placement`` is wrong.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise InputError(f"name of a dual variable must be an identifier, got {name!r}")
        if name in self.duals or hasattr(self.duals, name):
            raise InputError(f"name {name!r} of a dual variable is taken")
        variable = DualVariable(num_anchors, update, name=name, placement=placement)
        self.duals[name] = variable
        return variable

    @outside_graphs
    def entropic_risk(
        self,
        name: str | Sequence[str],
        scores: Tensor | Samples,
        index: Tensor,
        mask: Tensor | None = None,
        dual_scores: Tensor | Samples | None = None,
        previous_scores: Tensor | Samples | None = None,
        *,
        progress: float | None = None,
        fixed: Tensor | None = None,
    ) -> Tensor:
        r"""Mean dual objective of a batch; in training the dual variables at ``index`` are updated first.

        The gradient is :math:`\frac{1}{B} \sum_i \frac{1}{m_i} \sum_j e^{S_{ij} - \nu_i} \nabla S_{ij}` with the new ν
        (Wei et al. 2026, algorithm 1); an anchor that occurs several times counts once, by all its samples. Outside
        training (validation, sanity check, test, predict; without a Trainer: ``self.training`` False) ν is read and
        never written, and an anchor never visited takes ν = ℓ.

        Args:
            name: the dual, as given to :meth:`add_dual`; one for each side of the samples, where they have several.
            scores: shape ``(B, m)``: one row per anchor, one column per sample; any floating dtype. Or
                :class:`~scent_lightning.duals.Samples` that stand for them, for a loss which knows a faster way.
            index: dataset indices of the anchors, shape ``(B,)``, any integer dtype and device. An index that occurs
                twice, here or on another rank, moves once, by all its samples.
            mask: bool, shape ``(B, m)``, True where a sample counts; None means all do.
            dual_scores: other samples of the anchors, shape ``(B, k)``, that move ν in place of ``scores``, without
                gradient: the independent sample ζ' of the analysis. A mask of theirs by
                :class:`~scent_lightning.duals.DenseScores`.
            previous_scores: the scores of what moves ν (``dual_scores`` if given, else ``scores``; the same samples and
                mask) at the weights before the last optimiser step, which :meth:`at_previous_weights` works out;
                for an update that needs them (``MSVR``), and not looked at by the others.
            progress: fraction of the run that is done, in [0, 1], for step sizes that depend on it; None is what
                the Trainer says, or :meth:`set_dual_progress`.
            fixed: bool, broadcasts to ``(B, m)``, True for samples whose scores stay what they are, such as that of the
                own class less itself in a softmax; None: there are none. The loss and ν are the same with it and
                without: the proximal step for the weights needs it, see :mod:`scent_lightning.duals.weight_step`.

        Returns:
            A scalar in float32 (float64 for float64 scores). In a distributed run it is this process's share, of which
            the mean over processes is the whole.

        Raises:
            KeyError: no dual of that name.
            TypeError, ValueError, IndexError: an index, scores or mask that does not fit; nothing is written.
            DualDivergenceError: a non-finite score, ν or objective in training; nothing is written.
            InputError: the table was loaded from a checkpoint of another size (training only), a schedule needs the
                length of an endless run, ``dual_scores`` or ``previous_scores`` do not fit, or the latter are missing.
        """
        tables = [self._dual(name)] if isinstance(name, str) else [self._dual(each) for each in name]
        samples = samples_of_step(tables, scores, mask, dual_scores, previous_scores, fixed)
        if self.updates_duals():
            progress = self.dual_progress() if progress is None else check_progress(progress)
            if self.weight_step == "gradient":
                return step.entropic_risk(tables, samples, index, progress)
            checked_weight_step(self.weight_step)
            risk = step.entropic_risk(tables, samples, index, progress)
            self._exponential_part.watch(tables, samples, risk)
            return risk
        return step.evaluate(tables, samples, index)

    def _dual(self, name: str) -> DualVariable:
        if name not in self.duals:
            raise KeyError(f"no dual variable {name!r}; this module has: {', '.join(self.duals) or 'none'}")
        return cast(DualVariable, self.duals[name])

    def dual_progress(self) -> float:
        """Fraction of the run that is done, in [0, 1], for step sizes that depend on it.

        Counted in epochs against ``max_epochs``, in optimiser steps against ``max_steps`` and in seconds against
        ``max_time``, whichever comes first. Without a Trainer it is what :meth:`set_dual_progress` was told; else 0,
        with one warning if a step size depends on it.

        Raises:
            InputError: the run has no end and a step size follows a schedule.
        """
        progress = self.known_progress()
        if progress is None:
            if self._fitting() is not None:
                self._check_constant()
            else:
                for variable in self._variables():
                    variable.unknown_progress()
        return progress or 0.0

    def known_progress(self) -> float | None:
        """Fraction of the run that is done, in [0, 1]; None where the run has no end or nobody has told it."""
        trainer = self._fitting()
        return self._progress_told if trainer is None else run_progress(trainer)

    def _fitting(self) -> L.Trainer | None:
        """The Trainer, while it trains this module."""
        trainer = trainer_of(self)
        return trainer if trainer is not None and trainer.state.stage is RunningStage.TRAINING else None

    def set_dual_progress(self, progress: float) -> None:
        """Tell how much of the run is done where there is no Trainer: in a plain loop, or under Fabric.

        Args:
            progress: fraction of the run that is done, in [0, 1]; from now on, until told anew.

        Raises:
            ValueError: no number in [0, 1].
        """
        self._progress_told = check_progress(progress)

    def _check_constant(self) -> None:
        for variable in self._variables():
            if variable.update.needs_progress:
                raise InputError(
                    f"the schedule of dual variable {variable.name!r} ({variable.update!r}) needs to know how long the "
                    "run is: set trainer.max_steps, max_time, or max_epochs with a training set of known length"
                )

    def grow_duals(self, num_anchors: int) -> None:
        """Make room in every table for rows that were appended to the data set; see :meth:`DualVariable.grow`."""
        for variable in self._variables():
            variable.grow(num_anchors)

    def reset_duals(self) -> None:
        """Forget every ν of every table: all anchors count as never visited."""
        for variable in self._variables():
            variable.reset()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the format of the state, the random states of all processes, the progress of the run, and the gradient.

        The gradient is there between two optimiser steps, where it is accumulated over several batches.
        """
        super().on_save_checkpoint(checkpoint)
        self._resumption.save(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take what :meth:`on_save_checkpoint` added; older formats are known.

        The random states, the gradient and the place in the run belong to a run that is resumed, and to no other.

        Raises:
            InputError: a newer format than this package knows.
        """
        super().on_load_checkpoint(checkpoint)
        self._resumption.load(self, self._variables(), checkpoint, self.if_changed_data)

    def on_train_start(self) -> None:
        """Continue where the run that is resumed was: with its place in the epoch, its gradient and random numbers."""
        super().on_train_start()
        self._resumption.start(self, self._variables())

        if self.weight_step != "gradient":
            checked_weight_step(self.weight_step)
            check_training(self.trainer)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keep the weights if an update needs them, and shape the gradients; the Trainer clips them afterwards."""
        super().on_before_optimizer_step(optimizer)
        if self.weight_step != "gradient":
            self.shape_gradients(optimizer)

    def shape_gradients(self, optimizer: Any, loss_scale: float | None = None) -> None:
        """Multiply the gradients for a proximal step, after ``backward``; in a plain loop before ``optimizer.step()``.

        The Trainer calls it. An optimiser of another kind than SGD is left alone.

        Args:
            optimizer: that takes the step.
            loss_scale: in a plain loop what a gradient scaler has multiplied the loss by; the gradients are unscaled.

        Raises:
            InputError: a parameter group has no learning rate, or one below 0.
        """
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Lightning's wrapper of one
        exponential = self._exponential_part.take()
        if takes_proximal(optimizer):
            factors = scales(trainer_of(self), optimizer) if loss_scale is None else (loss_scale, 1.0)
            # Not by way of nn.Module's __setattr__, which looks for parameters first.
            self.__dict__["last_weight_step"] = proximal_gradients(optimizer, exponential, *factors)

    def on_train_epoch_end(self) -> None:
        """Learn how long an epoch is in a run that ends by the clock; look whether the indices can be right."""
        super().on_train_epoch_end()
        self._resumption.end_epoch(self.trainer, self._variables())
        warn_of_places_in_batches(self._variables(), self.trainer)

    def on_fit_start(self) -> None:
        """Stop before training on a table that belongs to another training set, or start it anew if that is wanted.

        Then say what the data module has read, see :func:`scent_lightning.summary.announce`.
        """
        super().on_fit_start()
        for variable in self._variables():
            variable.check_trainable()
        if rows_changed(self.trainer, self.if_changed_data):
            self.reset_duals()
        anchors = {variable.name: variable.num_anchors for variable in self._variables()}
        announce(self.trainer, anchors, self.fit_summary())

    def fit_summary(self) -> dict[str, str]:
        """What a fit says at its start besides what was read, by name; a subclass gives it."""
        return {}

    def to_torchscript(
        self, file_path: Any = None, method: str | None = "script", example_inputs: Any = None, **kwargs: Any
    ) -> Any:
        """As Lightning's, but traced only: the table of ν cannot be turned into a script.

        Raises:
            InputError: ``method`` is "script".
        """
        if method == "script":
            raise InputError(
                "method 'script' cannot turn a module with dual variables into TorchScript; pass method='trace' with "
                "example_inputs, or use torch.export.export"
            )
        return super().to_torchscript(file_path, method, example_inputs, **kwargs)

    @restricted_classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """As Lightning's, but a checkpoint is read as tensors and plain data whatever its place; nothing in it is run.

        A class that its hyperparameters name, of a backbone or a dual update for instance, is used where its module is
        imported already; no module is imported for it.

        Args:
            checkpoint_path: a path, a URL or an open file.
            map_location: as Lightning's, and so are the others.
            hparams_file: hyperparameters that replace those of the checkpoint.
            strict: whether the states must match.
            weights_only: has no effect.
            **kwargs: arguments of the task that replace those of the checkpoint.

        Raises:
            InputError: the file is truncated, is no checkpoint, or holds other objects than tensors and plain data; or
                it names a class of a module that is not imported; or an argument that the checkpoint cannot hold, such
                as a network, is missing.
        """
        saved = read_anywhere(checkpoint_path)
        named = named_by(saved, checkpoint_path, hparams_file)
        others = {name: value for name, value in named.items() if name not in kwargs}
        parent: Any = super()
        with without_imports_of(others, f"checkpoint {checkpoint_path}"):
            try:
                loaded = parent.load_from_checkpoint(
                    checkpoint_path, map_location, hparams_file, strict, weights_only=True, **kwargs
                )
            except (RuntimeError, TypeError, ValueError) as error:
                if lacking := given_as_objects(cls, saved.get("state_dict", {}), {**named, **kwargs}):
                    raise InputError(
                        f"{' and '.join(lacking)} must be given to load_from_checkpoint again: checkpoint "
                        f"{checkpoint_path} has the weights, not the Python object that they belong to"
                    ) from error
                raise
        return cast(Self, loaded)

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """As Lightning's, but a dual update is kept as plain data, so that checkpoints load with ``weights_only``."""
        if frame is None:
            current = inspect.currentframe()
            frame = current.f_back if current else None
        super().save_hyperparameters(*args, ignore=ignore, frame=frame, logger=logger)
        replace_hyperparameters(self, plain_hyperparameters(self))

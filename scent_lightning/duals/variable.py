"""A dual variable: the table of ν, and the loss that moves it."""

from __future__ import annotations

from torch import Tensor

from scent_lightning.compiling import outside_graphs
from scent_lightning.duals import step
from scent_lightning.duals.one_anchor import StepOfOne
from scent_lightning.duals.samples import Samples, as_samples
from scent_lightning.duals.separate import samples_of_step
from scent_lightning.duals.table import DualTable

__all__ = ["DualVariable"]


class DualVariable(DualTable):
    """A table of ν with the update that moves it.

    ``torch.compile`` leaves the table out of its graphs: what a step does depends on the numbers in it.

    ν is float32 whatever the module is cast to. Both tables move with the module and are in its state dict, but they
    are no buffers: an average of the weights (:class:`torch.optim.swa_utils.AveragedModel` and the callbacks built on
    it) leaves them alone, and its copy of the module reads the tables of the one that is trained. A row is written only
    by a step that was verified (or by :meth:`scatter`).

    Args:
        num_anchors: number of rows n, the length of the training set.
        update: the dual update, as an object or in the form of :meth:`~scent_lightning.updates.DualUpdate.config`.
        name: how errors call this dual.
        placement: "module" keeps the table on the module's device; "cpu" keeps it in main memory (5 bytes an anchor)
            and moves only the batch's rows.

    Attributes:
        nu: shape ``(n,)``, float32; 0 where never visited.
        visited: shape ``(n,)``, bool.
        update: the :class:`~scent_lightning.updates.DualUpdate`.
        auto: the :class:`~scent_lightning.updates.StepSizeRule` that finds its step size, or None.
        if_changed: what becomes of a state of another number of anchors when it is loaded: with "error" it can be
            evaluated with but not trained on; "grow" keeps the first rows' ν where there are more rows now, and the
            others start unvisited; "reset" starts all rows unvisited.

    Raises:
        InputError: ``num_anchors`` is not a positive integer, or ``placement`` is unknown.

    Example:
        >>> import torch
        >>> from scent_lightning.duals import SCENT, DualVariable
        >>> variable = DualVariable(num_anchors=10, update=SCENT(log_alpha=0.0))
        >>> loss = variable.entropic_risk(torch.zeros(2, 5), torch.tensor([3, 7]))
        >>> variable.visited.nonzero().flatten().tolist()
        [3, 7]
    """

    @outside_graphs
    def entropic_risk(
        self,
        scores: Tensor | Samples,
        index: Tensor,
        mask: Tensor | None = None,
        progress: float | None = None,
        *,
        dual_scores: Tensor | Samples | None = None,
        previous_scores: Tensor | Samples | None = None,
    ) -> Tensor:
        """Update ν at ``index`` and return the mean dual objective over the anchors that have a valid sample.

        An anchor that occurs several times counts once, by the mean over all its samples. A score of −∞ is a sample of
        weight 0; a row of nothing else has no sample.

        Args:
            scores: shape ``(B, m)``, any floating dtype; carries the gradient. Or samples that stand for them.
            index: dataset indices of the rows, shape ``(B,)``, any integer dtype and device.
            mask: bool, shape ``(B, m)``, True where a sample counts; None means all do.
            progress: fraction of the run that is done, in [0, 1], for the schedule; None is 0, with one warning if
                the step size depends on it.
            dual_scores: other samples that move ν in place of ``scores``; see
                :meth:`DualVariableMixin.entropic_risk`.
            previous_scores: the scores of what moves ν at the weights before the last optimiser step; likewise.

        Returns:
            A scalar in float32 (float64 for float64 scores); 0, with a zero gradient, if no row has a valid sample. In
            a distributed run it is this process's share, of which the mean over processes is the whole.

        Raises:
            TypeError, ValueError, IndexError: an index, scores or mask that does not fit; nothing is written.
            DualDivergenceError: a score that is NaN or +∞, or a ν or objective that is not finite; nothing is written.
            InputError: the table was loaded from a checkpoint of another size, or the update needs scores that the
                samples do not have; ``dual_scores`` or ``previous_scores`` do not fit the scores, or are missing.
        """
        if progress is None:
            progress = self.unknown_progress()
        samples = samples_of_step([self], scores, mask, dual_scores, previous_scores)
        return step.entropic_risk([self], samples, index, progress)

    @outside_graphs
    def evaluate(self, scores: Tensor | Samples, index: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mean dual objective with the ν at hand, read only; an anchor never visited takes ν = ℓ.

        Arguments, result and errors as :meth:`entropic_risk`, but a non-finite result is returned.
        """
        return step.evaluate([self], as_samples(scores, mask), index)

    @property
    def last_step(self) -> step.DualStep | None:
        """The latest :class:`~scent_lightning.duals.step.DualStep`, for monitors; None before the first."""
        last: step.DualStep | StepOfOne | None = self.last
        return step.DualStep.of_one(last) if isinstance(last, StepOfOne) else last

"""Retrieval and recommendation: two towers, and a softmax over all items."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import softplus
from torch.optim import Optimizer

from scent_lightning import distributed
from scent_lightning.data.interactions import Interactions
from scent_lightning.duals import DenseScores, DualUpdate, DualVariable, DualVariableMixin, Exponentials, Samples
from scent_lightning.duals.table import Placement
from scent_lightning.duals.weight_step import WeightStepRule
from scent_lightning.errors import InputError
from scent_lightning.functional import at_least_float32, log_sum_exp
from scent_lightning.functional.full_ranking import Entries, top_of_all
from scent_lightning.functional.proposals import correct_scores, log_inclusion_beside
from scent_lightning.modules.sampled_scores import Scoring, exponentials_of, score
from scent_lightning.modules.towers import EmbeddingTower
from scent_lightning.optim import RowSparseAdam
from scent_lightning.tasks.batches import class_numbers, three_parts
from scent_lightning.tasks.item_ranking import ItemRankingTask
from scent_lightning.tasks.training import LearningRate, LearningRateSchedule
from scent_lightning.validation import checked_choice, checked_integer, checked_number

__all__ = ["RetrievalTask"]

Batch = tuple[Tensor, Tensor, Tensor]
Negatives = Literal["in_batch", "uniform", "all"]
Correction = Literal["frequency", "none"]
Anchor = Literal["interaction", "query"]
_ANCHOR = "nu"


class _Scored(NamedTuple):
    """Scores of a batch against some items, shape ``(B, m)``, which count, and each row's own item's, ``(B, 1)``."""

    scores: Tensor
    mask: Tensor
    own: Tensor


class _Made(NamedTuple):
    """What a batch's scores are made of: what :meth:`RetrievalTask._candidates` gives, and the vectors by the towers.

    Attributes:
        vectors: of the batch's queries, shape ``(B, D)``.
        rows: of the candidates, shape ``(m, D)``.
    """

    candidates: Tensor
    place: Tensor
    drawn: Tensor | None
    log_probability: Tensor
    vectors: Tensor
    rows: Tensor


class RetrievalTask(ItemRankingTask):
    r"""Two towers whose product ranks all items for a query, by the softmax over them, from a few items a step.

    .. math:: \min \frac{1}{n} \sum_i \log \frac{1}{K - 1} \sum_{k \neq y_i} \exp q_i^\top (v_k - v_{y_i})

    Interaction i is of a query with the vector q and its item y; v are the vectors of the K items. Every interaction is
    an anchor with a dual variable, ``nu``.

    **Which negatives.** "in_batch" takes the distinct items of the batch, of all processes, where popular items are in
    most batches. Without a correction they are pushed away: the loss is of another distribution than that of the items.
    ``correction`` "frequency" subtracts from each item's score the logarithm of its probability to be in such a batch,
    so that the mean over the batch estimates the mean over all items and ν is the logarithm of that; an item that has
    no interaction in training is in no batch. "uniform" draws items evenly: no correction by frequency is needed, and
    most draws are easy. "all" is the exact softmax, for some ten thousand items at most.

    **Several right answers.** The other items of a query's training interactions are among its negatives, as they are
    in the softmax over all items that is evaluated; with ``mask_hits`` they are not, and count as 0 in the mean over
    the K − 1 others. Then nothing keeps a query's items near each other: on 174,700 interactions of 32,542 queries the
    recall of the first 20 was 0.43 with it and 0.47 without.

    Logs ``train/loss`` (dual objective) at logging steps, with ``negatives`` "all" the batch's softmax cross-entropy as
    ``train/cross_entropy``. For validation and test all items are ranked for each query, those of its training
    interactions left out: ``…/recall@k``, ``…/ndcg@k``, ``…/hit_rate@k`` for each of ``ks``, ``…/mrr``, and the exact
    ``…/cross_entropy`` over all items. An item without a training interaction is ranked last unless its tower reads a
    text, and so are the items of such a query. ``predict`` gives the best items of each query.

    The data module has the interactions of training as ``interactions`` and the texts of items, hashed, as
    ``item_texts``, as :class:`~scent_lightning.data.InteractionsDataModule` does; without one give them to
    :meth:`use_interactions`. In a distributed run the embeddings' sparse gradients are exchanged row by row.

    Args:
        num_queries: number of queries; the command line takes it from the data module.
        num_items: number of items K; the command line takes it from the data module.
        num_anchors: number of training interactions n; the command line takes it from the data module.
        dual: the dual update; the command line's ``--dual``.
        query_tower: makes vectors ``(B, D)`` of the queries in a batch; None: one of its own for each query.
        item_tower: makes vectors ``(m, D)`` of items; None: one of its own for each item.
        dim: entries of a vector where a tower is None.
        anchor: "interaction", or "query": one ν for each query, the logarithm of the mean of exp qᵀv, which moves
            whenever one of its interactions is in a batch.
        negatives: "in_batch", "uniform" or "all" other items.
        num_negatives: items drawn for a batch; "uniform" only.
        num_mined: hard negatives of each query beside those: its best items among all that it does not have in
            training. As they are there in each batch of the query, the estimate stays unbiased.
        mine_every_n_epochs: epochs after which hard negatives are found anew.
        correction: "frequency" takes in-batch negatives by how probable they are; "none" takes them as they come.
        mask_hits: leave out items that the query has in training as well.
        include_target: take the own item into the sum: the objective is the softmax cross-entropy itself then, up to
            its constant log(K − 1), and bounded below.
        normalize: scale vectors to unit norm.
        scale: multiplies the scores, above 0; use 10 to 50 with ``normalize``.
        lr: learning rate, above 0; None: 0.01.
        weight_decay: L2 penalty, at least 0; of the embeddings that are touched.
        optimizer: another optimiser by class path, with its own settings, which must take the embeddings' sparse
            gradients; None: :class:`~scent_lightning.optim.RowSparseAdam`.
        lr_schedule: "cosine", "geometric", "constant" or "step"; None: "cosine".
        warmup_epochs: epochs in which the rate rises first, at most a fifth of the run; None: 0.
        ks: numbers of items k that the metrics look at.
        top_k: number of items that ``predict`` gives.
        leave_out_seen: rank only items that the query does not have in training.
        item_chunk: items scored at a time in evaluation; on a GPU memory is batch × ``item_chunk`` numbers.
        dual_placement: "module" keeps the table of ν on the module's device, "cpu" in main memory.
        weight_step: "gradient", or "proximal" for an optimiser that is SGD; Adam's gradients are left alone by both.

    Raises:
        InputError: an argument out of its range; in a step a batch that is not (queries, items, index), items that are
            no integers of shape ``(B,)`` from 0 to K − 1, or interactions that are needed and were not given.

    Example:
        >>> import torch
        >>> from scent_lightning.duals import SCENT
        >>> queries, items = torch.tensor([0, 1, 1, 2]), torch.tensor([3, 0, 2, 3])
        >>> task = RetrievalTask(num_queries=3, num_items=5, num_anchors=4, dual=SCENT(log_alpha=0.0), dim=8)
        >>> task.use_interactions(Interactions(queries, items, 3, 5))
        >>> loss = task.training_step((queries, items, torch.arange(4)), 0)
        >>> loss.backward()
        >>> task.item_tower.embedding.weight.grad.coalesce().indices().tolist()
        [[0, 2, 3]]
    """

    learning_rates: ClassVar[Mapping[str, LearningRate]] = {
        "proximal": LearningRate(0.01),
        "gradient": LearningRate(0.01),
    }

    def __init__(
        self,
        num_queries: int,
        num_items: int,
        num_anchors: int,
        dual: DualUpdate,
        query_tower: nn.Module | None = None,
        item_tower: nn.Module | None = None,
        dim: int = 64,
        anchor: Anchor = "interaction",
        negatives: Negatives = "in_batch",
        num_negatives: int = 512,
        num_mined: int = 0,
        mine_every_n_epochs: int = 1,
        correction: Correction = "frequency",
        mask_hits: bool = False,
        include_target: bool = False,
        normalize: bool = False,
        scale: float = 1.0,
        lr: float | None = None,
        weight_decay: float = 0.0,
        optimizer: OptimizerCallable | None = None,
        lr_schedule: LearningRateSchedule | None = None,
        ks: Sequence[int] = (20,),
        top_k: int = 20,
        leave_out_seen: bool = True,
        item_chunk: int = 4096,
        dual_placement: Placement = "module",
        weight_step: WeightStepRule = "gradient",
        warmup_epochs: float | None = None,
    ) -> None:
        super().__init__(lr, 0.0, weight_decay, False, optimizer, lr_schedule, weight_step, warmup_epochs)
        checked_integer("num_queries", num_queries)
        checked_integer("num_items", num_items, least=2)
        checked_choice("anchor", anchor, get_args(Anchor))
        checked_choice("negatives", negatives, get_args(Negatives))
        checked_choice("correction", correction, get_args(Correction))
        if anchor == "query" and weight_step != "gradient":
            raise InputError(f"anchor 'query' needs weight_step 'gradient', got {weight_step!r}")
        self.num_queries, self.num_items = num_queries, num_items
        self.num_negatives: int = checked_integer("num_negatives", num_negatives)
        self.num_mined: int = checked_integer("num_mined", num_mined, least=0, most=num_items)
        self.mine_every_n_epochs: int = checked_integer("mine_every_n_epochs", mine_every_n_epochs)
        self.scale = checked_number("scale", scale, above=0)
        self.top_k: int = checked_integer("top_k", top_k)
        self.item_chunk: int = checked_integer("item_chunk", item_chunk)
        self.anchor, self.negatives, self.correction = anchor, negatives, correction
        self.mask_hits, self.include_target, self.normalize = mask_hits, include_target, normalize
        self.leave_out_seen = leave_out_seen
        self.save_hyperparameters()
        self.query_tower = EmbeddingTower(num_queries, dim) if query_tower is None else query_tower
        self.item_tower = EmbeddingTower(num_items, dim) if item_tower is None else item_tower
        self.add_dual(_ANCHOR, num_queries if anchor == "query" else num_anchors, dual, placement=dual_placement)
        self.add_ranking_metrics(ks)
        self.register_buffer("mined", torch.full((num_queries, num_mined), -1) if num_mined else None)
        self.add_placeholder()
        self._log_probability: tuple[int, Interactions, Tensor] | None = None

    def configure_optimizer(self, parameters: list[Any]) -> Optimizer:
        """Adam, lazy where gradients are sparse; called where the argument ``optimizer`` is None."""
        return RowSparseAdam(parameters, lr=self.lr, weight_decay=self.weight_decay)

    # ---------------------------------------------------------------- training

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Update ν at the batch's interactions and return the loss."""
        inputs, items, index = three_parts(batch, "queries, items")
        items = class_numbers(items, len(index))
        previous = self.at_previous_weights(lambda: self._samples(inputs, items, index)[0])
        samples, scored = self._samples(inputs, items, index)
        more: dict[str, Any] = {} if previous is None else {"previous_scores": previous}
        if scored is None:
            loss = self.entropic_risk(_ANCHOR, samples, index, **more)
        else:
            anchors = index
            if self.anchor == "query":
                anchors = self._of_rows(self._pairs("anchor 'query'").queries, index)
            loss = self.entropic_risk(_ANCHOR, scored.scores, anchors, scored.mask, **more)
            if self.anchor == "query":
                loss = loss - self._mean_over_anchors(scored)
        loss = self.with_placeholder(loss)
        if self.log_loss(loss) and self.negatives == "all":
            self._log_cross_entropy(scored)
        return loss

    def _of_rows(self, values: Tensor, index: Tensor) -> Tensor:
        """What the interactions ``index`` have; an index out of range is left to the table of ν to name."""
        return values[index.to(values.device, torch.int64).clamp(0, len(values) - 1)]

    def _mean_over_anchors(self, scored: _Scored) -> Tensor:
        """Mean score of the own items, each row weighted as in the dual objective."""
        step = cast(DualVariable, self.duals[_ANCHOR]).last_step
        own = at_least_float32(scored.own.squeeze(1))
        valid = scored.mask.any(dim=1)
        if step is None or step.row_weight is None:
            return (own * valid).sum() / valid.sum().clamp(min=1)
        return (own * step.row_weight.to(own.dtype) * valid).sum()

    def _log_cross_entropy(self, scored: _Scored | None) -> None:
        """Of the batch: over all items but those that are left out of the sum."""
        with torch.no_grad():
            if scored is None:
                step = cast(DualVariable, self.duals[_ANCHOR]).last_step
                if step is None:
                    return
                total = step.log_mean + math.log(self.num_items - 1)
            else:
                others = scored.scores if self.anchor == "interaction" else scored.scores - scored.own
                total = log_sum_exp(others.masked_fill(~scored.mask, -math.inf))
                if self.correction == "frequency":
                    total = total - scored.mask.sum(dim=1).log() + math.log(self.num_items - 1)
            self.log("train/cross_entropy", (total if self.include_target else softplus(total)).mean())

    def _samples(self, inputs: Tensor, items: Tensor, index: Tensor) -> tuple[Samples, _Scored | None]:
        """What the loss is of: exponentials where nothing is left out of a row's sum, else the scores."""
        try:
            made = self._made(inputs, items)
            found = self._exponentials(made, index)
            if found is not None:
                return found, None
            scored = self._scored(made, index, self.include_target)
        except (IndexError, RuntimeError):
            self._check_numbers(inputs, items)
            raise
        return DenseScores(scored.scores, scored.mask), scored

    def _made(self, inputs: Tensor, items: Tensor) -> _Made:
        """What is scored; the towers are called here, once a step."""
        candidates = self._candidates(items)
        return _Made(*candidates, self(inputs), self.item_vectors(candidates[0]))

    def _exponentials(self, made: _Made, index: Tensor) -> Exponentials | None:
        """The same as :meth:`_scored` without the matrix of scores; None where a row's sum lacks some items."""
        whole = self.anchor == "interaction" and self.negatives != "uniform" and not (self.mask_hits or self.num_mined)
        known = self.correction == "frequency" or not self.include_target
        if not whole or not known or type(self).entropic_risk is not DualVariableMixin.entropic_risk:
            return None
        number, scoring = len(made.candidates), Scoring(scale=self.scale)
        if number < 2 or not len(made.vectors):
            return None
        with torch.no_grad():
            logits, scored = score(made.vectors, made.rows, None, scoring)
            logits, offsets = at_least_float32(logits), None
            if self.correction == "frequency" and self.negatives == "in_batch":
                offsets = (math.log(number - 1) - math.log(self.num_items - 1) - made.log_probability).to(logits.dtype)

        def dense() -> DenseScores:
            found = self._scored(made, index, False)
            return DenseScores(found.scores, found.mask)

        found = exponentials_of(logits, made.place, made.vectors, made.rows, scored, scoring, offsets, dense)
        # The own item's score is 0, and it is there in every batch.
        return found.plus_constant(-math.log(self.num_items - 1)) if self.include_target else found

    def _scored(self, made: _Made, index: Tensor, include_target: bool) -> _Scored:
        """Scores of a batch, corrected."""
        candidates, place, drawn, log_probability, vectors, item_rows = made
        logits = self._scaled(vectors @ item_rows.T)
        own = logits.gather(1, place)
        scores = logits - own if self.anchor == "interaction" else logits
        columns = torch.arange(len(candidates), device=place.device)
        mask = columns != place
        if drawn is not None:
            mask &= drawn
        if self.mask_hits and self._interactions is not None:
            pairs = self._pairs("mask_hits")
            _leave_out(mask, candidates, *pairs.of_query.entries(self._of_rows(pairs.queries, index)))
        if include_target:
            mask = mask.scatter(1, place, True)
            # It is there in every batch.
            log_probability = log_probability.expand_as(scores).scatter(1, place, 0.0)
        if self.num_mined:
            mined = cast(Tensor, self.mined)[self._of_rows(self._pairs("num_mined").queries, index)]
            rows = torch.arange(len(mined), device=mined.device).unsqueeze(1).expand_as(mined)[mined >= 0]
            _leave_out(mask, candidates, rows, mined[mined >= 0])
            hard = self._against_mined(vectors, mined) - (own if self.anchor == "interaction" else 0.0)
            scores, mask = torch.cat([scores, hard.to(scores.dtype)], dim=1), torch.cat([mask, mined >= 0], dim=1)
            # So are a row's mined items, wherever the row is.
            log_probability = F.pad(log_probability.expand(len(mined), logits.shape[1]), (0, mined.shape[1]))
        if self.correction == "frequency":
            scores = correct_scores(scores, log_probability, self.num_items - 1, mask)
        return _Scored(scores, mask, own)

    def _check_numbers(self, inputs: Tensor, items: Tensor) -> None:
        """Raise InputError for the number of an item or a query that there is not, where looking does not wait."""
        numbers = {"items": (items, self.num_items)}
        if isinstance(self.query_tower, EmbeddingTower):
            numbers["queries"] = (inputs, self.num_queries)
        for name, (values, count) in numbers.items():
            if values.device.type == "cpu" and len(wrong := values[(values < 0) | (values >= count)]):
                raise InputError(f"{name} must be from 0 to {count - 1}, got {int(wrong[0])}")

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits if self.scale == 1 else logits * self.scale

    def _against_mined(self, vectors: Tensor, mined: Tensor) -> Tensor:
        """Scores of each row's own mined items, shape ``(B, M)``."""
        items = self.item_vectors(mined.clamp(min=0).flatten()).view(*mined.shape, -1)
        return self._scaled((items @ vectors.unsqueeze(2)).squeeze(2))

    def _candidates(self, items: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Items to score, in order: their numbers ``(m,)``, each row's own place ``(B, 1)``, which were drawn, log q.

        None where all of them were drawn.
        """
        if self.negatives == "all":
            return (
                torch.arange(self.num_items, device=items.device),
                items.unsqueeze(1),
                None,
                torch.zeros((), device=items.device),
            )
        if self.negatives == "uniform":
            return self._drawn_evenly(items)
        everyone = distributed.of_all_processes(items) if distributed.is_distributed() else items
        candidates = torch.unique(everyone)
        place = torch.searchsorted(candidates, items).unsqueeze(1)
        if self.correction == "none":
            return candidates, place, None, torch.zeros((), device=items.device)
        return candidates, place, None, self._log_inclusion(len(everyone))[candidates]

    def _log_inclusion(self, rows: int) -> Tensor:
        """Log-probability of each item to be in the other rows of a batch, shape ``(K,)``."""
        pairs = self._pairs("correction 'frequency' of in-batch negatives")
        if self._log_probability is None or self._log_probability[0] != rows or self._log_probability[1] is not pairs:
            found = log_inclusion_beside(pairs.counts, len(pairs), rows)
            self._log_probability = rows, pairs, found.float()
        return self._log_probability[2]

    def _drawn_evenly(self, items: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        draws = self.draws_of_step()
        device = items.device if draws is None else torch.device("cpu")
        drawn = torch.randint(self.num_items, (self.num_negatives,), generator=draws, device=device)
        # Of so many different ones each set is as probable as any other.
        drawn = torch.unique(drawn.to(items.device))
        candidates = torch.unique(torch.cat([items, drawn]))
        place = torch.searchsorted(candidates, items).unsqueeze(1)
        log_probability = torch.tensor(math.log(len(drawn) / self.num_items), device=items.device)
        return candidates, place, torch.isin(candidates, drawn), log_probability

    def on_train_epoch_start(self) -> None:
        """Mine, every so many epochs. In a run that is resumed within one, the checkpoint has what was mined."""
        super().on_train_epoch_start()
        if self.num_mined and self.current_epoch % self.mine_every_n_epochs == 0:
            self.mine()

    @torch.no_grad()
    def mine(self) -> None:
        """Find the ``num_mined`` best items of each query that it does not have in training, among all of them."""
        pairs = self._pairs("num_mined")
        items = list(self.item_chunks())
        for numbers in torch.arange(self.num_queries, device=self.device).split(self.item_chunk):  # type: ignore[no-untyped-call]
            seen = Entries(*pairs.of_query.entries(numbers))
            found, _ = top_of_all(self(self.query_inputs(numbers)), items, self.num_mined, seen)
            cast(Tensor, self.mined)[numbers] = found


def _leave_out(mask: Tensor, candidates: Tensor, rows: Tensor, items: Tensor) -> None:
    """Set the mask of some items of some rows to False, in place, where they are among the candidates."""
    places = torch.searchsorted(candidates, items).clamp(max=len(candidates) - 1)
    there = candidates[places] == items
    mask[rows[there], places[there]] = False

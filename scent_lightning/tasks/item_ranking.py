"""Tasks that rank all items for a query by the product of two vectors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric

from scent_lightning.data.interactions import Interactions, Ragged
from scent_lightning.errors import InputError
from scent_lightning.functional import at_least_float32
from scent_lightning.functional.full_ranking import Entries, rank_among_all, top_of_all
from scent_lightning.metrics.ranks import RankHitRate, RankNDCG, RankRecall, ReciprocalRank
from scent_lightning.modules.towers import EmbeddingTower
from scent_lightning.tasks.batches import three_parts
from scent_lightning.tasks.row_sparse import RowSparseTask

__all__ = ["ItemRankingTask"]


class ItemRankingTask(RowSparseTask):
    """Two towers, the interactions that they are trained on, and the evaluation against all items, in chunks.

    A subclass sets these attributes, calls :meth:`add_ranking_metrics`, and trains.

    Attributes:
        num_queries: number of queries.
        num_items: number of items K.
        query_tower: makes vectors ``(B, D)`` of the queries in a batch.
        item_tower: makes vectors ``(m, D)`` of items.
        normalize: whether vectors are scaled to unit norm.
        scale: multiplies the scores.
        top_k: number of items that ``predict`` gives.
        leave_out_seen: rank only items that the query does not have in training.
        item_chunk: items scored at a time.
    """

    num_queries: int
    num_items: int
    query_tower: nn.Module
    item_tower: nn.Module
    normalize: bool
    scale: float
    top_k: int
    leave_out_seen: bool
    item_chunk: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._interactions: Interactions | None = None
        self._item_texts: Ragged | None = None
        self._query_texts: Ragged | None = None
        self._keeps_vectors = False
        self._vectors: list[tuple[int, Tensor]] | None = None

    def add_ranking_metrics(self, ks: Sequence[int]) -> None:
        """Recall, NDCG and hit rate at each of ``ks``, MRR and the exact cross-entropy.

        Raises:
            InputError: no k, or one that is not a positive integer.
        """
        if not ks:
            raise InputError(f"ks must hold at least one k, got {ks!r}")
        metrics: dict[str, Metric] = {"cross_entropy": MeanMetric(), "mrr": ReciprocalRank()}
        for k in ks:
            metrics |= {f"recall@{k}": RankRecall(k), f"ndcg@{k}": RankNDCG(k), f"hit_rate@{k}": RankHitRate(k)}
        self.add_metrics(metrics, prog_bar=[f"recall@{ks[0]}", "cross_entropy"])

    # ---------------------------------------------------------------- data

    def use_interactions(
        self,
        interactions: Interactions | None,
        item_texts: Ragged | None = None,
        query_texts: Ragged | None = None,
    ) -> None:
        """Take what the data say; in a run with a data module the Trainer does so.

        Args:
            interactions: of training, in the order of the batches' index.
            item_texts: what the item tower reads of each item, a row for each; None: its number.
            query_texts: likewise of each query.

        Raises:
            InputError: of another number of queries, items or interactions than the task.
        """
        if interactions is not None:
            for name in ("num_queries", "num_items"):
                if getattr(interactions, name) != getattr(self, name):
                    raise InputError(
                        f"{name} of the interactions is {getattr(interactions, name)}, the task's {getattr(self, name)}"
                    )
        for name, texts in (("item", item_texts), ("query", query_texts)):
            count = self.num_items if name == "item" else self.num_queries
            if texts is not None and len(texts) != count:
                raise InputError(f"{name}_texts must have {count} rows, one for each, got {len(texts)}")
        self._interactions, self._item_texts, self._query_texts = interactions, item_texts, query_texts

    def setup(self, stage: str) -> None:
        """Take the interactions and texts of the data module."""
        super().setup(stage)
        data: Any = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "interactions"):
            texts = (getattr(data, name, None) for name in ("item_texts", "query_texts"))
            self.use_interactions(data.interactions, *texts)

    def _pairs(self, what_for: str) -> Interactions:
        """The interactions of training, on this module's device."""
        if self._interactions is None:
            raise InputError(
                f"{what_for} needs the interactions of training: use a data module that has them, such as "
                "InteractionsDataModule, or give them to use_interactions"
            )
        self._interactions = self._interactions.to(self.device)
        return self._interactions

    # ---------------------------------------------------------------- vectors

    def forward(self, inputs: Tensor) -> Tensor:
        """Vectors of queries, shape ``(B, D)``, of what a batch has of them."""
        return self._as_asked(self.query_tower(inputs))

    def item_vectors(self, items: Tensor) -> Tensor:
        """Vectors of items, shape ``(m, D)``, by their numbers, shape ``(m,)``."""
        if self._item_texts is None:
            return self._as_asked(self.item_tower(items))
        self._item_texts = self._item_texts.to(items.device)
        return self._as_asked(self.item_tower(self._item_texts.padded(items)))

    def query_inputs(self, queries: Tensor) -> Tensor:
        """What the query tower reads of queries, by their numbers, shape ``(B,)``."""
        if self._query_texts is None:
            return queries
        self._query_texts = self._query_texts.to(queries.device)
        return self._query_texts.padded(queries)

    def _as_asked(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=1) if self.normalize else vectors

    # ---------------------------------------------------------------- evaluation

    def on_validation_epoch_start(self) -> None:
        """The items' vectors are made once in an evaluation."""
        super().on_validation_epoch_start()
        self._keep_vectors(True)

    def on_validation_epoch_end(self) -> None:
        """And let go of at its end."""
        super().on_validation_epoch_end()
        self._keep_vectors(False)

    def on_test_epoch_start(self) -> None:
        """As for validation."""
        super().on_test_epoch_start()
        self._keep_vectors(True)

    def on_test_epoch_end(self) -> None:
        """As for validation."""
        super().on_test_epoch_end()
        self._keep_vectors(False)

    def on_predict_epoch_start(self) -> None:
        """As for validation."""
        super().on_predict_epoch_start()
        self._keep_vectors(True)

    def on_predict_epoch_end(self) -> None:
        """As for validation."""
        super().on_predict_epoch_end()
        self._keep_vectors(False)

    def _keep_vectors(self, keep: bool) -> None:
        self._keeps_vectors, self._vectors = keep, None

    def item_chunks(self) -> Iterable[tuple[int, Tensor]]:
        """Number of the first item and vectors, shape ``(m, D)``, of all items, chunk by chunk."""
        if not self._keeps_vectors:
            return self._made_chunks()
        if self._vectors is None:
            self._vectors = list(self._made_chunks())
        return self._vectors

    def _made_chunks(self) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, self.num_items, self.item_chunk):
            numbers = torch.arange(start, min(start + self.item_chunk, self.num_items), device=self.device)
            yield start, self.item_vectors(numbers)

    @torch.no_grad()
    def rank_items(self, queries: Tensor, vectors: Tensor, relevant: Tensor) -> tuple[Tensor, Tensor]:
        """Ranks of some items among all, and their softmax cross-entropies over all.

        Args:
            queries: numbers of the queries, shape ``(B,)``.
            vectors: theirs, shape ``(B, D)``.
            relevant: numbers of the items, shape ``(B, P)``; a row of fewer is filled up with −1.

        Returns:
            How many items come before each one, shape ``(B, P)``, −1 where there is none; and the cross-entropy of each
            of the V that there are, shape ``(V,)``. Items that a query has in training are not ranked, unless they are
            among ``relevant``.
        """
        right = Entries(*(relevant >= 0).nonzero(as_tuple=True))
        right = Entries(right.rows, relevant[relevant >= 0])
        own = at_least_float32((vectors[right.rows] * self.item_vectors(right.items)).sum(dim=1)) * self.scale
        left_out = self._left_out(queries).without(right, self.num_items)
        found, cross_entropy = rank_among_all(vectors, self.item_chunks(), right, own, left_out, self.scale)
        ranks = torch.full_like(relevant, -1)
        ranks[relevant >= 0] = torch.where(self._never_seen(queries, right), self.num_items - 1, found)
        return ranks, cross_entropy

    def _left_out(self, queries: Tensor) -> Entries:
        if not self.leave_out_seen or self._interactions is None:
            return Entries(queries[:0], queries[:0])
        return Entries(*self._pairs("leave_out_seen").of_query.entries(queries))

    def _never_seen(self, queries: Tensor, right: Entries) -> Tensor:
        """Which are of an item, or of a query, whose own vector was never trained: those come last."""
        never = torch.zeros_like(right.rows, dtype=torch.bool)
        if self._interactions is None:
            return never
        pairs = self._pairs("the ranking")
        if isinstance(self.item_tower, EmbeddingTower):
            never |= pairs.counts[right.items] == 0
        if isinstance(self.query_tower, EmbeddingTower):
            never |= pairs.of_query.lengths()[queries[right.rows]] == 0
        return never

    def evaluation_step(self, stage: str, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        """Rank the held-out items of a batch of (queries, items ``(B, P)``, numbers of the queries)."""
        inputs, relevant, queries = three_parts(batch, "queries, items")
        ranks, cross_entropy = self.rank_items(queries, self(inputs), relevant)
        self.log_metrics(stage, ranks=ranks, value=cross_entropy)

    def predict_step(self, batch: tuple[Tensor, Tensor | None, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The best items.

        Returns:
            ``query`` (its number), shape ``(B,)``; ``item`` and ``score``, shape ``(B, top_k)``, best first, −1 where
            no item is left. Where the data module has names, the file of predictions has those.
        """
        inputs, _, queries = three_parts(batch, "queries, items")
        found = top_of_all(self(inputs), self.item_chunks(), self.top_k, self._left_out(queries), self.scale)
        return {"query": queries, "item": found[0], "score": found[1]}

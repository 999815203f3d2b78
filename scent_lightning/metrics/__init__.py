"""Metrics, as torchmetrics modules, and the functions behind them.

The function ``partial_auc`` is not repeated here, because its name is that of its file:
``from scent_lightning.metrics.partial_auc import partial_auc``.
"""

from scent_lightning.metrics.effective_rows import EffectiveRows
from scent_lightning.metrics.entropic_risk import EntropicRisk
from scent_lightning.metrics.multi_label import PrecisionAtK, PropensityScoredPrecision, RecallAtK, label_propensities
from scent_lightning.metrics.partial_auc import (
    OneWayPartialAUC,
    PartialAUCObjective,
    TwoWayPartialAUC,
    partial_auc_objective,
    roc_curve,
    two_way_partial_auc,
)
from scent_lightning.metrics.ranking import GradedNDCG, ListMRR, graded_ndcg, list_reciprocal_rank
from scent_lightning.metrics.ranks import (
    RankHitRate,
    RankNDCG,
    RankRecall,
    ReciprocalRank,
    rank_hit_rate,
    rank_ndcg,
    rank_recall,
    reciprocal_rank,
)
from scent_lightning.metrics.retrieval import CaptionRecall, RetrievalRecall, retrieval_ranks
from scent_lightning.metrics.top_k import TopKAccuracy
from scent_lightning.metrics.zero_shot import ZeroShotAccuracy

__all__ = [
    "CaptionRecall",
    "EffectiveRows",
    "EntropicRisk",
    "GradedNDCG",
    "ListMRR",
    "OneWayPartialAUC",
    "PartialAUCObjective",
    "PrecisionAtK",
    "PropensityScoredPrecision",
    "RankHitRate",
    "RankNDCG",
    "RankRecall",
    "RecallAtK",
    "ReciprocalRank",
    "RetrievalRecall",
    "TopKAccuracy",
    "TwoWayPartialAUC",
    "ZeroShotAccuracy",
    "graded_ndcg",
    "label_propensities",
    "list_reciprocal_rank",
    "partial_auc_objective",
    "rank_hit_rate",
    "rank_ndcg",
    "rank_recall",
    "reciprocal_rank",
    "retrieval_ranks",
    "roc_curve",
    "two_way_partial_auc",
]

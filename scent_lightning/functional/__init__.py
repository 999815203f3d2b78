r"""Pure tensor functions: no state, no Lightning.

Notation: ``scores`` is :math:`S` with one row per anchor, shape ``(B, m)``; ``mask`` is True where a sample counts;
:math:`\ell_i = \log \frac{1}{m_i} \sum_j \exp S_{ij}` is the log-mean-exp over the valid samples of row ``i``; ``nu``
is the dual variable :math:`\nu`, shape ``(B,)``. All quantities are dimensionless (scores are already divided by the
temperature).
"""

from scent_lightning.functional.contrastive import (
    ContrastiveLogMeans,
    Everyone,
    contrastive_log_means,
    contrastive_log_moments,
    contrastive_loss,
    contrastive_scores,
)
from scent_lightning.functional.effective_rows import effective_rows, temperature_for
from scent_lightning.functional.lambert import lambert_w, lambert_w_of_log, proximal_scale
from scent_lightning.functional.log_mean_exp import (
    NO_SCORE,
    at_least_float32,
    log_mean_exp,
    log_mean_exp_from,
    log_sum_exp,
    may_be_infinite,
    mean_over,
    shift_by_largest,
    wide,
    wide_dtype,
)
from scent_lightning.functional.objectives import (
    exponential_objective,
    exponential_objective_from,
    softplus_objective,
    with_gradient,
)
from scent_lightning.functional.proposals import (
    correct_scores,
    log_expected_occurrences,
    log_inclusion_beside,
    log_inclusion_probability,
    log_inclusion_probability_with_repetition,
)
from scent_lightning.functional.residual_losses import ResidualLoss, residual_losses
from scent_lightning.functional.right_answers import (
    is_answer,
    list_scores,
    padded_answers,
    scores_of_answers,
    shares_of,
)
from scent_lightning.functional.steps import (
    asgd_step,
    guard,
    msvr_step,
    proximal_mirror_descent_step,
    proximal_point_step,
    softplus_asgd_step,
    sox_step,
    umax_step,
)
from scent_lightning.functional.surrogates import (
    SURROGATES,
    check_surrogate,
    pairwise_scores,
    pairwise_surrogate,
)

__all__ = [
    "NO_SCORE",
    "SURROGATES",
    "ContrastiveLogMeans",
    "Everyone",
    "ResidualLoss",
    "asgd_step",
    "at_least_float32",
    "check_surrogate",
    "contrastive_log_means",
    "contrastive_log_moments",
    "contrastive_loss",
    "contrastive_scores",
    "correct_scores",
    "effective_rows",
    "exponential_objective",
    "exponential_objective_from",
    "guard",
    "is_answer",
    "lambert_w",
    "lambert_w_of_log",
    "list_scores",
    "log_expected_occurrences",
    "log_inclusion_beside",
    "log_inclusion_probability",
    "log_inclusion_probability_with_repetition",
    "log_mean_exp",
    "log_mean_exp_from",
    "log_sum_exp",
    "may_be_infinite",
    "mean_over",
    "msvr_step",
    "padded_answers",
    "pairwise_scores",
    "pairwise_surrogate",
    "proximal_mirror_descent_step",
    "proximal_point_step",
    "proximal_scale",
    "residual_losses",
    "scores_of_answers",
    "shares_of",
    "shift_by_largest",
    "softplus_asgd_step",
    "softplus_objective",
    "sox_step",
    "temperature_for",
    "umax_step",
    "wide",
    "wide_dtype",
    "with_gradient",
]

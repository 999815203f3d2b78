"""Classification by partial AUC as an estimator of scikit-learn's kind."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.preprocessing import StandardScaler
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.utils.data import DataLoader

from scent_lightning.data import StratifiedBatchSampler
from scent_lightning.data.loading import sampled_loader
from scent_lightning.duals import BSGD, DualUpdate
from scent_lightning.sklearn.training import (
    Array,
    RowsInMemory,
    dual_of,
    epochs_of,
    isolated,
    network_of,
    outputs_of,
    seed_of,
    train,
)
from scent_lightning.sklearn.weights import WeightedAnchors, weights_of
from scent_lightning.tasks import PartialAUCTask
from scent_lightning.tasks.partial_auc import Surrogate
from scent_lightning.validation import checked_integer, checked_number

__all__ = ["PartialAUCClassifier"]


class _BothClasses(RowsInMemory):
    """Batches with rows of both classes.

    Args:
        rows: features, shape ``(n, d)``, and labels, 0 or 1, shape ``(n,)``.
        positives: positive rows of a batch.
        negatives: negative rows of a batch.
        seed: of their order.
    """

    def __init__(self, rows: tuple[Tensor, Tensor], positives: int, negatives: int, seed: int) -> None:
        super().__init__(rows, positives + negatives)
        self.sampler = StratifiedBatchSampler(rows[1], positives, negatives, seed=seed)

    def train_dataloader(self) -> DataLoader[Any]:
        """As many rows of each class in every batch."""
        return sampled_loader(self.existing("train"), self.sampler)


class _WeightedTask(PartialAUCTask):
    """Rows that count differently: positives as anchors, negatives in the mean of the exponentials.

    Args:
        weight: what each training row counts, shape ``(n,)``, 1 on average in each class.
        **arguments: of the task.
    """

    def __init__(self, weight: Tensor, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register_buffer("weight", weight, persistent=False)

    def _pairs(self, inputs: Tensor, labels: Tensor, index: Tensor) -> Any:
        log_weight = cast(Tensor, self.weight)[index[labels == 0]].log()
        pairs = super()._pairs(inputs, labels, index)
        losses = pairs.losses + log_weight
        return pairs._replace(losses=losses, moving=losses)

    def entropic_risk(self, name: Any, scores: Any, index: Tensor, *args: Any, **arguments: Any) -> Tensor:
        """As without weights, each anchor by its own."""
        samples = WeightedAnchors(scores, cast(Tensor, self.weight)[index])
        return super().entropic_risk(name, samples, index, *args, **arguments)


class PartialAUCClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    r"""Binary classification that maximises the left end of the ROC curve, for few positives among many negatives.

    .. math:: \min_w \frac{1}{n_+} \sum_{i \in S_+} \tau \log \frac{1}{n_-} \sum_{j \in S_-}
              \exp \frac{\ell(s_w(x_j) - s_w(x_i))}{\tau}

    (Wei et al. 2026, one-way partial AUC maximisation; Zhu et al. 2022). The smaller τ is, the more count the negatives
    of the highest scores. It is fitted by :class:`~scent_lightning.tasks.PartialAUCTask` on standardised features, with
    the scores themselves, so that a linear model has a convex objective. The order of the rows is what is learned; the
    threshold of ``predict`` is set afterwards, where the true-positive rate of the training rows is furthest above
    their false-positive rate.

    With weights the sums are weighted, in each class by itself: a positive counts :math:`w_i / \sum_{S_+} w`, a
    negative :math:`w_j / \sum_{S_-} w`. So a weight of 2 is a row that is there twice: the objective is the same
    number, a batch's gradient the same on average, and the fit the same where a batch holds all rows. (Not with
    ``SoftplusASGD``: its objective is no mean of exponentials, and it takes a negative's weight for more of its score.)

    Args:
        max_fpr: false-positive rate up to which the ROC curve matters, in (0, 1]: what ``score`` looks at.
        tau: temperature in the units of the surrogate, above 0; None: ``max_fpr`` times the surrogate's value for equal
            scores.
        surrogate: "squared_hinge", "squared", "hinge" or "logistic".
        margin: margin of the surrogate, in the units of the scores, at least 0.
        dual: a dual update, or the name of one; None is SCENT, with nothing to set (BSGD, which is exact, where every
            batch holds all negatives).
        hidden_layer_sizes: sizes of layers of ReLU; none is a linear model.
        lr: learning rate of SGD, above 0.
        momentum: momentum of SGD, in [0, 1).
        batch_size: rows of a batch, half of them positive; fewer of a class that has fewer.
        max_epochs: epochs of the fit; None: 30, and at least 2,000 steps.
        accelerator: "cpu", "gpu" or another of Lightning's.
        verbose: show the progress.
        random_state: seed, generator or None, as everywhere in scikit-learn.

    Attributes:
        classes_: the two classes, the negative one first.
        coef_: of a linear model, shape ``(1, d)``, in the units of the data.
        intercept_: of a linear model, shape ``(1,)``; the threshold is in it.
        network_: of another, on standardised features; None for a linear one.
        tau_: temperature that was used.
        n_iter_: epochs.
        n_features_in_: number of features d.
        feature_names_in_: names of the features, where they have names.

    Raises:
        ValueError: in ``fit``: data that do not fit, other than two classes, an argument out of its range.
        DualDivergenceError: in ``fit``: a number that is not finite.

    Example:
        >>> from sklearn.datasets import load_breast_cancer
        >>> features, labels = load_breast_cancer(return_X_y=True)
        >>> model = PartialAUCClassifier(max_fpr=0.1, max_epochs=30, random_state=0).fit(features, labels)
        >>> model.score(features, labels) > 0.95
        True
    """

    def __init__(
        self,
        max_fpr: float = 0.3,
        *,
        tau: float | None = None,
        surrogate: Surrogate = "squared_hinge",
        margin: float = 1.0,
        dual: DualUpdate | str | None = None,
        hidden_layer_sizes: tuple[int, ...] = (),
        lr: float = 0.01,
        momentum: float = 0.9,
        batch_size: int = 64,
        max_epochs: int | None = None,
        accelerator: str = "cpu",
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        self.max_fpr = max_fpr
        self.tau = tau
        self.surrogate = surrogate
        self.margin = margin
        self.dual = dual
        self.hidden_layer_sizes = hidden_layer_sizes
        self.lr = lr
        self.momentum = momentum
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.accelerator = accelerator
        self.verbose = verbose
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    # ---------------------------------------------------------------- fit

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PartialAUCClassifier:
        """Fit the model.

        Args:
            X: features, shape ``(n, d)``: an array or a table.
            y: class of each row, shape ``(n,)``, two of any type; the later one in their order is positive.
            sample_weight: what each row counts, at least 0, shape ``(n,)``; None: all alike.

        Returns:
            This estimator.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        self.classes_, labels = self._two_classes(y)
        weight = weights_of(sample_weight, X)
        kept = weight > 0
        X, labels, weight = X[kept], labels[kept], weight[kept]
        self._two_classes(y[kept])
        checked_number("max_fpr", self.max_fpr, above=0, most=1)
        self._scaler = StandardScaler().fit(X, sample_weight=weight)
        network = self._train(self._scaler.transform(X), labels, weight)

        self._threshold = 0.0
        self.network_ = None if isinstance(network, nn.Linear) else network.eval()
        if isinstance(network, nn.Linear):
            self.coef_ = network.weight.numpy() / self._scaler.scale_
            self.intercept_ = network.bias.numpy() - self.coef_ @ self._scaler.mean_
        threshold = _best_threshold(labels, self._scores(X), weight)
        if self.network_ is None:
            self.intercept_ = self.intercept_ - threshold
        else:
            self._threshold = threshold
        return self

    def _train(self, features: Array, labels: npt.NDArray[np.int64], weight: Array) -> nn.Module:
        """The network, trained on standardised features."""
        half = max(1, checked_integer("batch_size", self.batch_size, least=2) // 2)
        in_class = labels == 1
        sizes = int(in_class.sum()), int((~in_class).sum())
        positives, negatives = (min(half, size) for size in sizes)
        weight = weight / np.where(in_class, weight[in_class].mean(), weight[~in_class].mean())
        self.n_iter_ = epochs_of(self.max_epochs, max(1, len(labels) // (positives + negatives)))
        seed = seed_of(self.random_state)
        with isolated(seed, self.verbose):
            network = network_of(features.shape[1], self.hidden_layer_sizes)
            if isinstance(network, nn.Linear):
                network.double()
                for parameter in network.parameters():
                    nn.init.zeros_(parameter)
            kind = next(network.parameters()).dtype
            # With all negatives in every batch there is nothing to average: ν = ℓ is exact.
            default = BSGD() if negatives == sizes[1] else None
            task = _WeightedTask(
                torch.from_numpy(weight).to(kind),
                num_anchors=len(labels),
                dual=dual_of(default if self.dual is None else self.dual),
                network=network,
                tau=self._temperature(),
                surrogate=self.surrogate,
                margin=self.margin,
                score="raw",
                max_fpr=self.max_fpr,
                lr=self.lr,
                momentum=self.momentum,
            )
            rows = torch.tensor(features, dtype=kind), torch.from_numpy(labels)
            data = _BothClasses(rows, positives, negatives, seed)
            train(task, data, self.n_iter_, self.accelerator, self.verbose)
        network.requires_grad_(False)
        self.tau_ = task.tau
        return network

    def _two_classes(self, labels: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        check_classification_targets(labels)
        kind = type_of_target(labels, input_name="y", raise_unknown=True)
        if kind != "binary":
            raise ValueError(f"Only binary classification is supported. The type of the target is {kind}.")
        classes, numbers = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y must have two classes, got one class: {classes[0]!r}")
        return classes, numbers.astype(np.int64)

    def _temperature(self) -> float:
        if self.tau is not None:
            return checked_number("tau", self.tau, above=0)
        unit = {"squared_hinge": self.margin**2, "squared": self.margin**2, "hinge": self.margin}
        return self.max_fpr * (unit.get(self.surrogate, 1.0) or 1.0)

    # ---------------------------------------------------------------- what was fitted

    def decision_function(self, X: Any) -> Array:
        """Scores, shape ``(n,)``, above 0 for the positive class, for features of shape ``(n, d)``."""
        check_is_fitted(self, "tau_")
        return self._scores(validate_data(self, X, dtype=np.float64, reset=False))

    def _scores(self, features: Array) -> Array:
        if self.network_ is None:
            linear: Array = (features @ self.coef_.T + self.intercept_).squeeze(1)
            return linear
        return outputs_of(self.network_, self._scaler.transform(features)) - self._threshold

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The class of each row, shape ``(n,)``."""
        check_is_fitted(self, "tau_")
        return self.classes_[(self.decision_function(X) > 0).astype(np.int64)]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Partial AUC up to ``max_fpr``, standardised so that 0.5 is chance and 1 is perfect (McClish 1989)."""
        positive = np.asarray(y) == self.classes_[1]
        return float(
            roc_auc_score(positive, self.decision_function(X), max_fpr=self.max_fpr, sample_weight=sample_weight)
        )


def _best_threshold(labels: npt.NDArray[np.int64], scores: Array, weight: Array) -> float:
    """Halfway between the scores that Youden's index is greatest between."""
    false_positives, true_positives, thresholds = roc_curve(
        labels, scores, sample_weight=weight, drop_intermediate=False
    )
    best = float(thresholds[int(np.argmax(true_positives - false_positives))])
    if not np.isfinite(best):  # no score tells the classes apart
        return float(scores.max())
    below = scores[scores < best]
    return (best + float(below.max())) / 2 if len(below) else best - 1.0

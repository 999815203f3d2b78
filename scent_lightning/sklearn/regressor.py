"""Robust regression as an estimator of scikit-learn's kind."""

from __future__ import annotations

import math
from typing import Any, cast, get_args

import numpy as np
import torch
from scipy.special import logsumexp
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.linear_model import LinearRegression
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from scent_lightning.duals import DualUpdate
from scent_lightning.functional import ResidualLoss, effective_rows, residual_losses
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
from scent_lightning.sklearn.weights import weights_of
from scent_lightning.tasks import DRORegressionTask
from scent_lightning.validation import checked_choice, checked_integer, checked_number

__all__ = ["EntropicRiskRegressor"]

# τ where none is given, in mean losses of least squares: normal residuals have worst-case weights of finite variance
# above 4.
_MEAN_LOSSES = 5.0


class _WeightedTask(DRORegressionTask):
    """Rows that count differently.

    Args:
        log_weight: logarithm of what each training row counts, shape ``(n,)``, 1 on average.
        **arguments: of the task.
    """

    def __init__(self, log_weight: Tensor, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register_buffer("log_weight", log_weight, persistent=False)

    def scores(self, features: Tensor, target: Tensor, index: Tensor) -> Tensor:
        """The losses over τ plus the logarithms of the weights, shape ``(1, B)``."""
        return super().scores(features, target, index) + cast(Tensor, self.log_weight)[index]


class EntropicRiskRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    r"""Regression that minimises the entropic risk of the loss: its worst case under a KL penalty.

    .. math:: \min_w \tau \log \frac{1}{n} \sum_i \exp\frac{\text{loss}(f_w(x_i), y_i)}{\tau}

    (Wei et al. 2026, appendix on KL-regularised distributionally robust optimisation). Small τ looks at the worst rows,
    large τ at the mean; least squares is the limit. It is fitted by :class:`~scent_lightning.tasks.DRORegressionTask`,
    on features and a target that are standardised and with τ scaled along, which leaves the problem as it is.

    Args:
        tau: temperature in the units of the loss, above 0 (of the squared loss, the square of the target's units);
            None: five times the mean loss of least squares, whatever units the target has.
        loss: "squared", "absolute" or "huber".
        huber_delta: where the Huber loss turns from squared to linear, in the units of the target.
        dual: a dual update, or the name of one; None is SCENT, with nothing to set.
        hidden_layer_sizes: sizes of layers of ReLU; none is a linear model.
        lr: learning rate of SGD, above 0, for a standardised target; None is the task's own.
        batch_size: rows of a batch; at most all.
        max_epochs: epochs of the fit; None: 30, and at least 2,000 steps.
        accelerator: "cpu", "gpu" or another of Lightning's.
        verbose: show the progress.
        random_state: seed, generator or None, as everywhere in scikit-learn.

    Attributes:
        coef_: of a linear model, shape ``(d,)``, in the units of the data.
        intercept_: of a linear model.
        network_: of another, on standardised features; None for a linear one.
        tau_: temperature that was used.
        entropic_risk_: objective over the training rows.
        effective_rows_: effective number of training rows in the worst case, 1/Σp²; near 1, the model is fitted to
            hardly more than one row, and a larger ``tau`` looks at more.
        least_squares_risk_: objective of least squares, where a linear model starts.
        n_iter_: epochs.
        n_features_in_: number of features d.
        feature_names_in_: names of the features, where they have names.

    Raises:
        ValueError: in ``fit``: data or weights that do not fit, an argument out of its range.
        DualDivergenceError: in ``fit``: a number that is not finite.

    Example:
        >>> import numpy as np
        >>> features = np.arange(12.0).reshape(-1, 1)
        >>> target = np.where(features[:, 0] == 11, 8.0, 0.0)
        >>> robust = EntropicRiskRegressor(tau=1.0, max_epochs=300, random_state=0).fit(features, target)
        >>> least_squares = LinearRegression().fit(features, target)
        >>> [float(round(abs(model.predict(features) - target).max(), 1)) for model in (robust, least_squares)]
        [3.7, 5.6]
    """

    def __init__(
        self,
        tau: float | None = None,
        *,
        loss: ResidualLoss = "squared",
        huber_delta: float = 1.0,
        dual: DualUpdate | str | None = None,
        hidden_layer_sizes: tuple[int, ...] = (),
        lr: float | None = None,
        batch_size: int = 100,
        max_epochs: int | None = None,
        accelerator: str = "cpu",
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        self.tau = tau
        self.loss = loss
        self.huber_delta = huber_delta
        self.dual = dual
        self.hidden_layer_sizes = hidden_layer_sizes
        self.lr = lr
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.accelerator = accelerator
        self.verbose = verbose
        self.random_state = random_state

    # ---------------------------------------------------------------- fit

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> EntropicRiskRegressor:
        """Fit the model.

        Args:
            X: features, shape ``(n, d)``: an array or a table.
            y: target, shape ``(n,)``.
            sample_weight: what each row counts, at least 0, shape ``(n,)``; None: all alike.

        Returns:
            This estimator.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        y = y.astype(np.float64)
        checked_choice("loss", self.loss, get_args(ResidualLoss))
        delta = checked_number("huber_delta", self.huber_delta, above=0)
        weight = weights_of(sample_weight, X)
        kept = weight > 0
        X, y, weight = X[kept], y[kept], weight[kept] / weight[kept].mean()

        self._scaler = StandardScaler().fit(X, sample_weight=weight)
        features = self._scaler.transform(X)
        centre = np.average(y, weights=weight)
        unit = math.sqrt(np.average((y - centre) ** 2, weights=weight)) or 1.0
        target = (y - centre) / unit
        least_squares = LinearRegression().fit(features, target, sample_weight=weight)

        unit_of_loss = unit if self.loss == "absolute" else unit**2
        losses = _losses(least_squares.predict(features) - target, self.loss, delta / unit)
        mean = float(np.average(losses, weights=weight))
        if self.tau is None:
            # Where least squares leaves nothing, any temperature will do.
            tau = _MEAN_LOSSES * mean if mean > 1e-12 else 1.0
            self.tau_ = tau * unit_of_loss
        else:
            self.tau_ = checked_number("tau", self.tau, above=0)
            tau = self.tau_ / unit_of_loss
        self.least_squares_risk_ = unit_of_loss * _risk(losses, tau, weight)

        batch_size = min(checked_integer("batch_size", self.batch_size), len(y))
        self.n_iter_ = epochs_of(self.max_epochs, math.ceil(len(y) / batch_size))
        with isolated(seed_of(self.random_state), self.verbose):
            network = network_of(features.shape[1], self.hidden_layer_sizes)
            if isinstance(network, nn.Linear):
                network.double()
                with torch.no_grad():
                    network.weight.copy_(torch.from_numpy(least_squares.coef_).unsqueeze(0))
                    network.bias.fill_(float(least_squares.intercept_))
            kind = next(network.parameters()).dtype
            task = _WeightedTask(
                torch.from_numpy(np.log(weight)).to(kind),
                num_features=features.shape[1],
                dual=dual_of(self.dual),
                tau=tau,
                loss=self.loss,
                huber_delta=delta / unit,
                network=network,
                lr=self.lr,
            )
            rows = (torch.tensor(features, dtype=kind), torch.tensor(target, dtype=kind))
            train(task, RowsInMemory(rows, batch_size), self.n_iter_, self.accelerator, self.verbose)
        network.requires_grad_(False)

        self._target = centre, unit
        if isinstance(network, nn.Linear):
            self.network_ = None
            self.coef_ = network.weight.numpy().squeeze(0) * unit / self._scaler.scale_
            self.intercept_ = float(centre + unit * network.bias.item() - self.coef_ @ self._scaler.mean_)
        else:
            self.network_ = network.eval()
        final = _losses(self._predicted(X) - y, self.loss, delta)
        self.entropic_risk_ = _risk(final, self.tau_, weight)
        log_weights = final / self.tau_ + np.log(weight)
        self.effective_rows_ = effective_rows(torch.from_numpy(log_weights), tau=1.0).item()
        return self

    # ---------------------------------------------------------------- what was fitted

    def predict(self, X: Any) -> Array:
        """Predictions, shape ``(n,)``, for features of shape ``(n, d)``."""
        check_is_fitted(self, "tau_")
        return self._predicted(validate_data(self, X, dtype=np.float64, reset=False))

    def _predicted(self, features: Array) -> Array:
        if self.network_ is None:
            predicted: Array = features @ self.coef_ + self.intercept_
            return predicted
        centre, unit = self._target
        found: Array = centre + unit * outputs_of(self.network_, self._scaler.transform(features))
        return found

    def losses(self, X: Any, y: Any) -> Array:
        """Loss of each row, shape ``(n,)``, in the units of the loss."""
        check_is_fitted(self, "tau_")
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, reset=False)
        return _losses(self._predicted(X) - y, self.loss, self.huber_delta)

    def worst_case_weights(self, X: Any, y: Any, sample_weight: Any = None) -> Array:
        """What each row counts in the worst case, proportional to exp(loss/τ), shape ``(n,)``; they sum to 1."""
        losses = self.losses(X, y)
        log_weights = losses / self.tau_
        if sample_weight is not None:
            with np.errstate(divide="ignore"):
                log_weights = log_weights + np.log(weights_of(sample_weight, losses.reshape(-1, 1)))
        return cast(Array, np.exp(log_weights - logsumexp(log_weights)))


def _losses(residual: Array, loss: ResidualLoss, delta: float) -> Array:
    return residual_losses(torch.from_numpy(residual), loss, delta).numpy()


def _risk(losses: Array, tau: float, weight: Array) -> float:
    """The entropic risk; weights are 1 on average."""
    return float(tau * (logsumexp(losses / tau, b=weight) - math.log(len(losses))))

"""The estimators: scikit-learn's own checks, and what they find against optima worked out otherwise."""

import logging
import math
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import logsumexp
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from scent_lightning.sklearn import EntropicRiskRegressor, PartialAUCClassifier
from scent_lightning.updates import MSVR, SCENT, SOX, SoftplusASGD, UMax

FEATURES, TARGET = load_diabetes(return_X_y=True)
CANCER, LABELS = load_breast_cancer(return_X_y=True)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [EntropicRiskRegressor(max_epochs=30), PartialAUCClassifier(max_epochs=30)])
def test_passes_scikit_learns_checks(estimator):
    with pytest.warns(Warning, match="SCIPY_ARRAY_API"):  # the one check that is skipped
        results = check_estimator(estimator)
    assert len(results) > 50
    passed = {each["check_name"] for each in results if each["status"] == "passed"}
    assert "check_sample_weight_equivalence_on_dense_data" in passed


def objective(parameters, features, target, tau, weight):
    scores = (features @ parameters[:-1] + parameters[-1] - target) ** 2 / tau
    return tau * (scores.max() + np.log(np.average(np.exp(scores - scores.max()), weights=weight)))


def least(features, target, tau, weight=None):
    scaled = (features - features.mean(axis=0)) / features.std(axis=0)
    start = np.zeros(features.shape[1] + 1)
    unit = target.std() ** 2
    normal = (target - target.mean()) / target.std()
    return unit * minimize(objective, start, (scaled, normal, tau / unit, weight), method="BFGS").fun


@pytest.mark.parametrize("units", [1.0, 1e-4])
def test_regression_reaches_the_least_entropic_risk_in_any_units(units):
    target = TARGET * units
    model = EntropicRiskRegressor(tau=5000.0 * units**2, max_epochs=200, random_state=0).fit(FEATURES, target)
    best = least(FEATURES, target, model.tau_)
    found = objective(np.append(model.coef_, model.intercept_), FEATURES, target, model.tau_, None)
    assert model.entropic_risk_ == pytest.approx(found, rel=1e-9)
    gap = (found - best) / (model.least_squares_risk_ - best)
    assert 0 <= gap < 0.01


def test_weights_are_repeats():
    weight = np.random.default_rng(0).integers(0, 4, 60)
    features, target = FEATURES[:60, :3], TARGET[:60]
    weighted = EntropicRiskRegressor(max_epochs=50, random_state=0).fit(features, target, sample_weight=weight)
    repeated = EntropicRiskRegressor(max_epochs=50, random_state=0).fit(
        features.repeat(weight, axis=0), target.repeat(weight)
    )
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, rtol=1e-6)
    assert weighted.entropic_risk_ == pytest.approx(repeated.entropic_risk_, rel=1e-9)


@pytest.mark.parametrize("weight", [None, np.random.default_rng(0).random(len(TARGET)) * (np.arange(len(TARGET)) % 3)])
def test_effective_rows_are_those_of_the_worst_case_weights(weight):
    model = EntropicRiskRegressor(max_epochs=2, random_state=0).fit(FEATURES, TARGET, sample_weight=weight)
    shares = model.worst_case_weights(FEATURES, TARGET, sample_weight=weight)
    assert model.effective_rows_ == pytest.approx(1 / np.square(shares).sum(), rel=1e-9)


def test_worst_case_weights_are_proportional_to_the_exponential_of_the_loss():
    model = EntropicRiskRegressor(max_epochs=2, random_state=0).fit(FEATURES, TARGET)
    weights = model.worst_case_weights(FEATURES, TARGET)
    losses = (model.predict(FEATURES) - TARGET) ** 2
    assert weights.sum() == pytest.approx(1)
    np.testing.assert_allclose(np.log(weights[1:] / weights[:-1]), np.diff(losses) / model.tau_, atol=1e-9)
    some = model.worst_case_weights(FEATURES, TARGET, sample_weight=np.arange(len(TARGET)) % 2)
    assert (some[::2] == 0).all()
    np.testing.assert_allclose(some[1::2], weights[1::2] / weights[1::2].sum())


@pytest.mark.parametrize("loss", ["absolute", "huber"])
def test_other_losses_do_not_depend_on_the_units(loss):
    models = [
        EntropicRiskRegressor(tau=tau, loss=loss, huber_delta=20 * units, max_epochs=5, random_state=0).fit(
            FEATURES, TARGET * units
        )
        for units, tau in ((1.0, 60.0 if loss == "absolute" else 3000.0), (0.5, 30.0 if loss == "absolute" else 750.0))
    ]
    np.testing.assert_allclose(models[1].coef_ * 2, models[0].coef_, rtol=1e-6)
    assert models[0].entropic_risk_ < models[0].least_squares_risk_


def test_layers_learn_what_a_linear_model_cannot():
    features = np.random.default_rng(0).uniform(-1, 1, (400, 1))
    target = np.abs(features[:, 0])
    layers = EntropicRiskRegressor(hidden_layer_sizes=(16,), max_epochs=100, random_state=0).fit(features, target)
    assert layers.score(features, target) > 0.9
    assert layers.entropic_risk_ < 0.3 * layers.least_squares_risk_
    assert not hasattr(layers, "coef_")
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(layers)).predict(features), layers.predict(features))


def test_search_over_temperatures_with_a_table_and_names():
    table = load_diabetes(as_frame=True)
    search = GridSearchCV(
        make_pipeline(StandardScaler().set_output(transform="pandas"), EntropicRiskRegressor(max_epochs=3)),
        {"entropicriskregressor__tau": [3000.0, 30000.0]},
        cv=2,
    ).fit(table.data, table.target)
    best = search.best_estimator_[-1]
    assert list(best.feature_names_in_) == list(table.data.columns)
    assert best.tau_ in (3000.0, 30000.0)


def partial_auc_objective(coefficients, positives, negatives, tau, weights=(None, None)):
    """The objective and its gradient, weights of the positives and of the negatives included."""
    of_positives, of_negatives = (
        np.ones(len(rows)) if weight is None else np.asarray(weight, float)
        for rows, weight in zip((positives, negatives), weights, strict=True)
    )
    hinge = np.maximum(1 + (negatives @ coefficients)[None, :] - (positives @ coefficients)[:, None], 0)
    total = logsumexp(hinge**2 / tau, axis=1, b=of_negatives)
    anchor = of_positives / of_positives.sum()
    share = of_negatives * np.exp(hinge**2 / tau - total[:, None]) * 2 * hinge * anchor[:, None]
    gradient = share.sum(axis=0) @ negatives - share.sum(axis=1) @ positives
    return tau * anchor @ (total - math.log(of_negatives.sum())), gradient


def test_partial_auc_reaches_the_least_objective():
    features = StandardScaler().fit_transform(CANCER[:, :4])
    rows = features[LABELS == 1], features[LABELS == 0]
    best = minimize(partial_auc_objective, np.zeros(4), (*rows, 0.3), jac=True, method="L-BFGS-B").fun
    model = PartialAUCClassifier(max_fpr=0.3, lr=0.03, max_epochs=150, random_state=0).fit(features, LABELS)
    found = partial_auc_objective(model.coef_[0], *rows, model.tau_)[0]
    start = partial_auc_objective(np.zeros(4), *rows, model.tau_)[0]
    assert model.tau_ == 0.3
    assert 0 <= (found - best) / (start - best) < 0.02
    own = roc_auc_score(LABELS, model.decision_function(features), max_fpr=0.3)
    assert model.score(features, LABELS) == pytest.approx(own)


@pytest.mark.parametrize("batch_size", [64, 1200], ids=["parts", "whole"])
def test_weights_of_both_classes_lead_to_the_weighted_optimum(batch_size):
    """Weights that matter: half of the rows of each class, chosen by a feature, count a tenth of the others."""
    features = StandardScaler().fit_transform(CANCER[:, :4])
    weight = np.where(features[:, 1] > 0, 1.0, 0.1)
    rows = features[LABELS == 1], features[LABELS == 0]
    weights = weight[LABELS == 1], weight[LABELS == 0]
    best = minimize(partial_auc_objective, np.zeros(4), (*rows, 0.3, weights), jac=True, method="L-BFGS-B")
    plain = minimize(partial_auc_objective, np.zeros(4), (*rows, 0.3), jac=True, method="L-BFGS-B")
    few = {"max_epochs": 80, "lr": 0.05} if batch_size == 64 else {"max_epochs": 250, "lr": 0.3}
    model = PartialAUCClassifier(batch_size=batch_size, random_state=0, **few).fit(features, LABELS, weight)
    gap, unweighted = (
        partial_auc_objective(found, *rows, 0.3, weights)[0] - best.fun for found in (model.coef_[0], plain.x)
    )
    assert 0 <= gap < 0.3 * unweighted


@pytest.mark.parametrize(
    "dual", [None, "BSGD", SOX(gamma=0.3), SCENT(1.0), SoftplusASGD(0.1, 0.1), MSVR(0.5, 0.5), UMax(0.1, 1.0)], ids=repr
)
def test_a_weight_is_a_repeated_row_where_a_batch_is_the_whole_set(dual):
    weight = np.random.default_rng(1).integers(0, 4, 80)
    features, labels = CANCER[:80, :5], LABELS[:80]
    if isinstance(dual, SoftplusASGD):  # whose objective is no mean of exponentials: of anchors only
        weight[labels == 0] = 1
    arguments = {"dual": dual, "batch_size": 400, "max_epochs": 30, "random_state": 0}
    weighted = PartialAUCClassifier(**arguments).fit(features, labels, sample_weight=weight)
    repeated = PartialAUCClassifier(**arguments).fit(features.repeat(weight, axis=0), labels.repeat(weight))
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, rtol=1e-6)
    np.testing.assert_allclose(weighted.intercept_, repeated.intercept_, rtol=1e-6)
    found = weighted.score(features, labels, sample_weight=weight)
    assert found == pytest.approx(repeated.score(features.repeat(weight, axis=0), labels.repeat(weight)))


def test_weights_of_equal_size_change_nothing_and_those_of_a_class_count_within_it():
    arguments = {"max_epochs": 3, "random_state": 0}
    plain = PartialAUCClassifier(**arguments).fit(CANCER, LABELS)
    for weight in (np.full(len(LABELS), 7.0), 5):
        same = PartialAUCClassifier(**arguments).fit(CANCER, LABELS, sample_weight=weight)
        np.testing.assert_allclose(same.coef_, plain.coef_, rtol=1e-6)
    with pytest.raises(ValueError, match="two classes"):
        PartialAUCClassifier(**arguments).fit(CANCER, LABELS, sample_weight=LABELS)


def test_classes_of_any_kind_and_a_threshold_that_tells_them_apart():
    names = np.where(LABELS == 1, "healthy", "ill")
    model = PartialAUCClassifier(max_epochs=20, random_state=0).fit(pd.DataFrame(CANCER), names)
    assert list(model.classes_) == ["healthy", "ill"]
    assert (model.predict(pd.DataFrame(CANCER)) == names).mean() > 0.95
    layers = PartialAUCClassifier(hidden_layer_sizes=(8,), max_epochs=20, random_state=0).fit(CANCER, names)
    assert (layers.predict(CANCER) == names).mean() > 0.95


@pytest.mark.parametrize(
    "model", [EntropicRiskRegressor(max_epochs=2), PartialAUCClassifier(max_epochs=2)], ids=["regressor", "classifier"]
)
def test_a_fit_is_quiet_and_leaves_the_random_state_alone(model, capfd, recwarn, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    levels = logging.getLogger("lightning.pytorch").level
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model.fit(CANCER, LABELS)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.initial_seed() == 5
    assert logging.getLogger("lightning.pytorch").level == levels
    out, error = capfd.readouterr()
    assert (out, error) == ("", "")
    assert not list(recwarn)
    assert not list(tmp_path.iterdir())


def test_the_same_seed_gives_the_same_and_updates_are_not_shared():
    update = SCENT()
    model = EntropicRiskRegressor(dual=update, max_epochs=3, random_state=3)
    first = model.fit(FEATURES, TARGET).coef_
    np.testing.assert_array_equal(clone(model).fit(FEATURES, TARGET).coef_, first)
    assert not np.array_equal(model.set_params(random_state=4).fit(FEATURES, TARGET).coef_, first)
    by_name = EntropicRiskRegressor(dual="SCENT", max_epochs=3, random_state=3).fit(FEATURES, TARGET)
    np.testing.assert_array_equal(by_name.coef_, first)
    other = EntropicRiskRegressor(dual=SOX(gamma=0.5), max_epochs=3, random_state=3).fit(FEATURES, TARGET)
    assert not np.array_equal(other.coef_, first)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"tau": 0.0}, "tau"),
        ({"loss": "cubic"}, "loss"),
        ({"dual": "SENT"}, "SENT"),
        ({"dual": 3}, "dual must be"),
        ({"max_epochs": 0}, "max_epochs"),
        ({"batch_size": 0}, "batch_size"),
        ({"huber_delta": -1.0}, "huber_delta"),
        ({"hidden_layer_sizes": (0,)}, "hidden_layer_sizes"),
        ({"lr": -1.0}, "lr"),
    ],
)
def test_regression_names_what_is_wrong(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        EntropicRiskRegressor(**arguments).fit(FEATURES, TARGET)


def test_weights_that_cannot_be():
    for weight, sentence in ((-np.ones(len(TARGET)), "at least 0, got -1"), (np.zeros(len(TARGET)), "non-zero")):
        with pytest.raises(ValueError, match=sentence):
            EntropicRiskRegressor(max_epochs=1).fit(FEATURES, TARGET, sample_weight=weight)
        with pytest.raises(ValueError, match=sentence):
            PartialAUCClassifier(max_epochs=1).fit(FEATURES, TARGET > 150, sample_weight=weight)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_fpr": 0.0}, "max_fpr"),
        ({"tau": -1.0}, "tau"),
        ({"surrogate": "cubic"}, "surrogate"),
        ({"margin": -1}, "margin"),
    ],
)
def test_classification_names_what_is_wrong(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        PartialAUCClassifier(**arguments).fit(CANCER, LABELS)

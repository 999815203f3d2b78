"""Estimators for scikit-learn's pipelines and searches, on the same tasks as the command line.

>>> from sklearn.datasets import load_diabetes
>>> from scent_lightning.sklearn import EntropicRiskRegressor
>>> features, target = load_diabetes(return_X_y=True)
>>> model = EntropicRiskRegressor(max_epochs=30, random_state=0).fit(features, target)
>>> bool(model.entropic_risk_ < model.least_squares_risk_)
True
"""

from scent_lightning.sklearn.classifier import PartialAUCClassifier
from scent_lightning.sklearn.regressor import EntropicRiskRegressor

__all__ = ["EntropicRiskRegressor", "PartialAUCClassifier"]

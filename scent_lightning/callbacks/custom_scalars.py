"""What TensorBoard's page *custom scalars* shows of a run, from its top to its bottom."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from scent_lightning.duals import DualVariable

__all__ = ["custom_scalars"]

Layout = dict[str, dict[str, list[Any]]]
_STAGES = ("train", "val", "test")
# What Lightning adds to a name that is logged both in each step and over the epoch.
_ENDINGS = ("_step", "_epoch")


def custom_scalars(duals: Mapping[str, DualVariable], logged: Iterable[str] = ()) -> Layout:
    """The layout of the page: how training and validation go, then each dual variable.

    TensorBoard's other pages sort tags by name, which puts ``dual/…`` before ``train/…``; here the order is ours.

    Args:
        duals: the dual variables by name.
        logged: names of the run's metrics that are known so far; without them one chart has the training loss and one
            all of validation.

    Returns:
        Charts by their titles, for each category by its title, as ``SummaryWriter.add_custom_scalars`` takes them;
        empty without dual variables.
    """
    if not duals:
        return {}
    of_duals = {f"dual variable {name}": _dual(name, variable) for name, variable in duals.items()}
    return {"training and validation": _metrics(logged), **of_duals}


def _metrics(logged: Iterable[str]) -> dict[str, list[Any]]:
    """A chart for each metric, training, validation and test in one; the loss comes first."""
    charts: dict[str, list[str]] = {"loss": []}
    for name in logged:
        stage, quantity = _parted(name)
        if stage in _STAGES:
            charts.setdefault(quantity, []).append(f"^{re.escape(name)}$")
    if not any(charts.values()):
        return {"loss": ["Multiline", ["^train[/_]loss"]], "validation": ["Multiline", ["^val[/_]"]]}
    return {title: ["Multiline", tags] for title, tags in charts.items() if tags}


def _parted(name: str) -> tuple[str, str]:
    """Stage and quantity of a metric's name: "train" and "loss" of "train/loss_epoch" and of "train_loss"."""
    stage, quantity = re.fullmatch(r"([^/_]*)[/_]?(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    for ending in _ENDINGS:
        quantity = quantity.removesuffix(ending)
    return stage, quantity or name


def _dual(name: str, variable: DualVariable) -> dict[str, list[Any]]:
    """ν (of several anchors with its quantiles as a band), the weights, and the step size."""
    tag = f"dual/{name}"
    of_any = f"^{re.escape(tag)}"
    nu: dict[str, list[Any]] = {"ν": ["Multiline", [f"{of_any}/mean$"]]}
    if variable.num_anchors > 1:
        nu = {"ν: median, 1 % to 99 %": ["Margin", [f"{tag}/table_q50", f"{tag}/table_q01", f"{tag}/table_q99"]]}
    return {
        **nu,
        "weight exp(ℓ − ν): mean and largest": ["Multiline", [f"{of_any}/weight(_max)?$"]],
        "step size": ["Multiline", [f"{of_any}/(log_alpha|alpha|gamma|effective_gamma)$"]],
    }

"""Tables of regression by name: bundled with scikit-learn, in a folder, or downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from sklearn.datasets import fetch_california_housing, fetch_openml, load_diabetes

from scent_lightning.data.table_files import read_table
from scent_lightning.errors import InputError

__all__ = ["KNOWN_TABLES"]


def _diabetes(data_dir: Path) -> tuple[pd.DataFrame, str]:
    frame: pd.DataFrame = load_diabetes(as_frame=True, scaled=False).frame
    frame["target"] /= 100
    return frame, "target"


def _find(data_dir: Path, folder: str, file: str) -> Path | None:
    return next((path for path in (data_dir / folder / file, data_dir / file) if path.is_file()), None)


def _fetch(name: str, data_dir: Path, file: str, fetch: Callable[[], Any]) -> pd.DataFrame:
    try:
        frame: pd.DataFrame = fetch().frame
    except Exception as error:
        raise InputError(
            f"data set {name!r} is neither in data_dir ({data_dir / name / file}) nor could it be downloaded: {error}"
        ) from error
    return frame


def _california_housing(data_dir: Path) -> tuple[pd.DataFrame, str]:
    path = _find(data_dir, "california_housing", "cal_housing.csv")
    if path is None:
        frame = _fetch(
            "california_housing", data_dir, "cal_housing.csv", lambda: fetch_california_housing(as_frame=True)
        )
        return frame, "MedHouseVal"
    raw = read_table(path)
    # The derived columns of scikit-learn's fetch_california_housing, in its order.
    frame = pd.DataFrame(
        {
            "MedInc": raw["median_income"],
            "HouseAge": raw["housing_median_age"],
            "AveRooms": raw["total_rooms"] / raw["households"],
            "AveBedrms": raw["total_bedrooms"] / raw["households"],
            "Population": raw["population"],
            "AveOccup": raw["population"] / raw["households"],
            "Latitude": raw["latitude"],
            "Longitude": raw["longitude"],
            "MedHouseVal": raw["median_house_value"] / 100_000,
        }
    )
    return frame, "MedHouseVal"


def _abalone(data_dir: Path) -> tuple[pd.DataFrame, str]:
    path = _find(data_dir, "abalone", "abalone.csv")
    if path is None:
        frame = _fetch(
            "abalone", data_dir, "abalone.csv", lambda: fetch_openml("abalone", version=1, as_frame=True, parser="auto")
        )
    else:
        frame = read_table(path)
    sex, target = frame.columns[0], frame.columns[-1]
    rings = frame[target].astype(float)
    frame = frame.rename(columns={target: "Rings"})
    frame["Rings"] = 10 * (rings - rings.min()) / (rings.max() - rings.min())
    frame[sex] = frame[sex].map({"M": 1, "F": 2, "I": 3}).astype(float)
    return frame, "Rings"


KNOWN_TABLES: dict[str, Callable[[Path], tuple[pd.DataFrame, str]]] = {
    "diabetes": _diabetes,
    "california_housing": _california_housing,
    "abalone": _abalone,
}

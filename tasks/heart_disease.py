"""Heart disease at four hospitals, prepared as by FLamby: real sites with a published protocol.

Data: Janosi, Steinbrunn, Pfisterer, Detrano: Heart Disease, UCI Machine Learning Repository, 1988.
Protocol: Ogier du Terrail et al.: FLamby: Datasets and Benchmarks for Cross-Silo Federated
Learning in Realistic Healthcare Settings, NeurIPS 2022, https://arxiv.org/abs/2210.04620
(Fed-Heart-Disease).

The columns slope, ca and thal, which most hospitals have not measured, are left out, and then the
rows with a missing value: 740 of 920 patients stay. The type of chest pain and the resting ECG
become one input each, without their first value. Class 1 is any disease. At each hospital 66 % of
the rows are for training.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhet.common.errors import ConfigError, SetupError, require_choice
from fedhet.common.text_files import Dialect
from fedhet.tasks.tables import read_table, require_columns

if TYPE_CHECKING:  # pandas takes a second to import
    from pandas import DataFrame

NAME = "heart_disease"
NUMBERS = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
CATEGORIES = {"cp": (2, 3, 4), "restecg": (1, 2)}  # of each column all values but the first
NORMALISED = ("hospital", "pooled")
_TARGET = "target"
_SPLIT_SEED, _TRAIN_SHARE = 43, 0.66
_LEAST = 4

Rows = tuple[NDArray[Any], ...]


def load(
    *,
    path: str | None = None,
    client_column: str = "hospital",
    data_folder: Path | None = None,
    hospitals: Sequence[str] | None = None,
    normalise: str = "hospital",
) -> tuple[Rows, Rows]:
    """Return the training and the test rows: inputs (n, 13), labels (n,), hospitals (n,).

    Args:
        path: heart_disease.csv, or a folder with it; None: FEDHET_DATA.
        client_column: the column of the hospitals.
        data_folder: with partition=site, a hospital's folder with its own heart_disease.csv; the
            rows are then returned without their hospital.
        hospitals: train on the rows of these alone; None: of all. Test rows come from all.
        normalise: hospital: an input less its mean, over its standard deviation, of the training
            rows of each row's hospital; pooled: of all training rows.

    Raises:
        ConfigError: for a missing file or column, an unknown hospital, or one with under four rows.
    """
    require_choice("task.data_options.normalise", normalise, NORMALISED)
    if data_folder is not None and normalise != "hospital":
        raise ConfigError(
            f"task.data_options.normalise={normalise}: with partition=site each hospital has only "
            "its own rows: set it to hospital"
        )
    table = _complete_rows(read_table(_file(data_folder or path), Dialect()), client_column)
    names = table[client_column].astype(str).to_numpy(dtype=str)
    known = sorted(set(names.tolist()))
    for name in hospitals or ():
        require_choice("task.data_options.hospitals", name, known)
    inputs, labels = _inputs(table), (table[_TARGET].to_numpy() > 0).astype(np.int64)
    train = np.zeros(len(labels), dtype=bool)
    for name in known:
        rows = np.flatnonzero(names == name)
        if len(rows) < _LEAST:
            raise ConfigError(
                f"{table.attrs['path']} has {len(rows)} complete rows of the hospital {name}: at "
                f"least {_LEAST} are needed, so that two are to train on"
            )
        train[rows[_training_rows(labels[rows])]] = True
    scaled = np.empty_like(inputs)
    groups = [names == name for name in known] if normalise == "hospital" else [names == names]
    for group in groups:
        scaled[group] = _scaled(inputs[group], inputs[group & train])
    chosen = train & np.isin(names, known if hospitals is None else list(hospitals))

    def rows_of(part: NDArray[np.bool_]) -> Rows:
        rows = scaled[part].astype(np.float32), labels[part]
        return rows if data_folder is not None else (*rows, names[part])

    return rows_of(chosen), rows_of(~train)


class LogisticRegression(nn.Module):
    """Logistic regression with one output z, as the two logits 0 and z.

    Their cross-entropy is the binary cross-entropy of z, and so are its gradients.
    """

    def __init__(self, features: int = 13) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, 2) of inputs (B, features)."""
        positive = self.linear(inputs)
        return torch.cat([torch.zeros_like(positive), positive], dim=1)


def _file(path: str | Path | None) -> Path:
    given = path or os.environ.get("FEDHET_DATA")
    if given is None:
        raise SetupError(
            f"task.path=null: name {NAME}.csv, or set FEDHET_DATA to its parent folder"
        )
    place = Path(given).expanduser()
    inside = place / f"{NAME}.csv"
    if place.is_dir():
        return inside if inside.is_file() else place / NAME / inside.name
    return place


def _complete_rows(table: DataFrame, client_column: str) -> DataFrame:
    """Return the rows without a missing value, as numbers, with their hospitals."""
    columns = [*NUMBERS, *CATEGORIES, _TARGET]
    require_columns(table, (client_column,), "task.client_column")
    require_columns(table, columns, "task.path")
    whole = table[[client_column, *columns]].dropna()
    try:
        return whole.astype(dict.fromkeys(columns, float))
    except ValueError:
        raise ConfigError(f"{table.attrs['path']} has text in a column of numbers") from None


def _inputs(table: DataFrame) -> NDArray[np.float64]:
    numbers: list[Any] = [table[name].to_numpy() for name in NUMBERS]
    for name, values in CATEGORIES.items():
        numbers += [(table[name] == value).to_numpy(dtype=np.float64) for value in values]
    return np.stack(numbers, axis=1)


def _training_rows(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a hospital's rows to train on; stratified if each class has more than two."""
    from sklearn.model_selection import train_test_split

    strata = labels if np.bincount(labels, minlength=2).min() > 2 else None
    rows, _ = train_test_split(
        np.arange(len(labels)),
        train_size=_TRAIN_SHARE,
        random_state=_SPLIT_SEED,
        stratify=strata,
    )
    return np.asarray(rows)


def _scaled(inputs: NDArray[np.float64], train: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return normalised inputs; one that is the same in all training rows becomes 0."""
    deviations = train.std(axis=0, ddof=1)
    scaled = (inputs - train.mean(axis=0)) / np.where(deviations > 0, deviations, 1.0)
    return np.where(deviations > 0, scaled, 0.0)

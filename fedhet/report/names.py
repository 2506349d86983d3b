"""Readable names for the keys of recipes and the columns of metrics.jsonl."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from fedhet.common.metrics import evaluation_of
from fedhet.conf.mistakes import method_lines

_TITLE = re.compile(r"([^(:]+?) \([^)]*\): ")  # "FedAvg (McMahan et al. 2017): mean of ..."
_COLUMNS = {
    "lr": "learning rate",
    **{"f1": "F1", "f1_weighted": "weighted F1", "auroc": "AUROC", "mcc": "MCC", "iou": "IoU"},
    **{"mae": "MAE", "mse": "MSE", "rmse": "RMSE", "mape": "MAPE", "smape": "sMAPE", "r2": "R2"},
    **{"top5_accuracy": "top-5 accuracy", "cohen_kappa": "Cohen's kappa"},
    **{"pearson": "Pearson correlation", "spearman": "Spearman correlation"},
    "bytes_up": "bytes sent by the clients",
    "bytes_down": "bytes sent to the clients",
    "seconds": "seconds a round",
    "simulated_seconds": "simulated seconds",
    "clients": "clients in the mean",
    "norm_ratio": "norm ratio",
    "update_cosine": "pairwise cosine",
}


@lru_cache
def _methods() -> dict[str, str]:
    """Return the name of each method as its summary has it."""
    titles = {name: _TITLE.match(summary) for name, summary in method_lines().items()}
    return {name: title[1] for name, title in titles.items() if title}


def method_title(method: str) -> str:
    """Return ``FedPVR + FedProx`` for ``fedpvr+fedprox``; an unknown method keeps its name."""
    return " + ".join(_methods().get(name, name) for name in method.split("+"))


def column_title(column: str) -> str:
    """Return ``train loss`` for ``train_loss``, ``client F1`` for ``client_f1``."""
    metric, slash, class_name = column.partition("/")
    where = evaluation_of(metric)
    name = metric.removeprefix(where)
    words = where.replace("_", " ") + _COLUMNS.get(name, name.replace("_", " "))
    return f"{words}{slash}{class_name}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """Return ``A, B and C``; of more than ``most`` names, the first and how many others."""
    names = list(dict.fromkeys(names))
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} others"]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def plain(text: str) -> str:
    """Return a text for Matplotlib in which what is between two $ is no formula."""
    return text.replace("$", r"\$")

"""The metrics that ``evaluation.metrics`` can name: their tasks and ranges, and what is better.

``fedhet.tasks.metrics`` computes their values and needs torch; this table does not. A metric of the
user's own is a function ``package.module:function``. Rows use the function's name, and list such
names as ``own_metrics``, because no table has them.

A measured value has a :class:`MetricName`: what is evaluated, the metric, and the class of a value
for one class. metrics.jsonl, summary.json and recipes write it as text: ``client_f1/cat``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fedhet.common.errors import ConfigError

Kind = Literal["classification", "segmentation", "regression"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SHOWN_METRICS = 3  # in a round's line, beside accuracy and loss
HERE = ""  # the new model at the server
CLIENT = "client_"  # the new model at the clients, a mean over them (evaluation.clients)
RECEIVED = "received_"  # the model before the round, the same (evaluation.received)
PERSONAL_TEST, PERSONAL = "personal_test_", "personal_"  # the clients' own models
BEST = "best_"  # in summaries: before the name of the best value
OWN = "own_metrics"  # in rows and summaries: the names of the user's own metrics
_PREFIXES = (CLIENT, RECEIVED, PERSONAL_TEST, PERSONAL)
# Columns of metrics.jsonl and keys of summary.json, which docs/running.md explains.
_TAKEN = frozenset(
    """
    absent accuracy alarms attack_success best_accuracy best_model best_round bytes_down
    bytes_up client_accuracy client_loss client_names clients clipped_share clipping_norm
    config_sha256 confusion data down_weighted dp_epsilon dp_epsilon_sampled dp_sensitivity
    drift_diversity dropped effective_step elapsed_seconds error failures fingerprint
    fit_seconds format gradient_reach late left_out lorentz_distance loss lr lr_sum machine
    max_staleness metrics_sha256 model norm_ratio num_examples num_steps own_metrics
    parameters_sha256 partition penalty penalty_share per_client personal_accuracy
    personal_test_accuracy personal_test_loss prediction_sets received_accuracy received_loss
    round rounds rounds_without_rows run seconds seconds_per_round seed server_folder
    server_seconds sha256 simulated_seconds soft_label_epsilon staleness standing_out state_lost
    status step_norm stop_reason strategy strategy_class table task train_loss update_cosine
    update_norm versions wall_seconds
    """.split()
)


@dataclass(frozen=True)
class Metric:
    """What is known about a metric without its values."""

    kinds: tuple[Kind, ...]
    low: float = 0.0  # the range of its values
    high: float = 1.0
    larger_is_better: bool = True
    per_class: bool = False  # whether it has a value for each class


_CLASSES: tuple[Kind, ...] = ("classification", "segmentation")
_CLASSIFICATION: tuple[Kind, ...] = ("classification",)
_SEGMENTATION: tuple[Kind, ...] = ("segmentation",)
_REGRESSION: tuple[Kind, ...] = ("regression",)
_ERROR = Metric(_REGRESSION, high=math.inf, larger_is_better=False)
_FIT = Metric(_REGRESSION, low=-math.inf)
_CORRELATION = Metric(_REGRESSION, low=-1.0)

METRICS: Mapping[str, Metric] = {
    "accuracy": Metric(_CLASSES, per_class=True),
    "balanced_accuracy": Metric(_CLASSES),
    "top5_accuracy": Metric(_CLASSIFICATION),
    "precision": Metric(_CLASSES, per_class=True),
    "recall": Metric(_CLASSES, per_class=True),
    "specificity": Metric(_CLASSES, per_class=True),
    "f1": Metric(_CLASSES, per_class=True),
    "f1_weighted": Metric(_CLASSES),
    "auroc": Metric(_CLASSIFICATION, per_class=True),
    "average_precision": Metric(_CLASSIFICATION, per_class=True),
    "cohen_kappa": Metric(_CLASSES, low=-1.0),
    "mcc": Metric(_CLASSES, low=-1.0),
    "calibration_error": Metric(_CLASSIFICATION, larger_is_better=False),
    "iou": Metric(_CLASSES, per_class=True),
    "dice": Metric(_SEGMENTATION, per_class=True),
    "perplexity": Metric(_SEGMENTATION, low=1.0, high=math.inf, larger_is_better=False),
    "mae": _ERROR,
    "mse": _ERROR,
    "rmse": _ERROR,
    "mape": _ERROR,
    "smape": Metric(_REGRESSION, high=2.0, larger_is_better=False),
    "r2": _FIT,
    "explained_variance": _FIT,
    "pearson": _CORRELATION,
    "spearman": _CORRELATION,
}
_LOSS = Metric(KINDS, low=-math.inf, high=math.inf, larger_is_better=False)
_ROUNDING = 1e-6  # a float32 mean of ones may be a little more than 1


def metrics_of(kind: Kind) -> list[str]:
    """Return the names of the metrics that a kind of task has."""
    return [name for name, metric in METRICS.items() if kind in metric.kinds]


def is_own(word: str) -> bool:
    """Return whether a word of ``evaluation.metrics`` names a function of the user's."""
    return ":" in word


def row_name(word: str) -> str:
    """Return a metric's name in rows: for a function, the function's name."""
    return word.rpartition(":")[2].rpartition(".")[2]


def own_names(words: Iterable[str]) -> list[str]:
    """Return the names in rows of the user's own metrics in ``evaluation.metrics``."""
    return list(dict.fromkeys(row_name(word) for word in words if is_own(word)))


def is_taken(name: str) -> bool:
    """Return whether rows or summaries use this name, or its beginning, for something else."""
    return name in METRICS or name in _TAKEN or name.startswith((BEST, "num_", *_PREFIXES))


@dataclass(frozen=True)
class MetricName:
    """Names a measured value.

    Attributes:
        name: the name of a metric, a loss, or the user's own metric.
        where: what is evaluated, the prefix of the text: HERE, CLIENT, RECEIVED, ...
        class_name: None for a value over all classes.
    """

    name: str
    where: str = HERE
    class_name: str | None = None

    @classmethod
    def read(cls, text: str) -> MetricName:
        """Read a name of metrics.jsonl, or of a reply, which has hyphens: ``received-f1``."""
        base, slash, class_name = text.partition("/")
        base = base.replace("-", "_")
        where = next((one for one in _PREFIXES if base.startswith(one)), HERE)
        return cls(base.removeprefix(where), where, class_name if slash else None)

    def __str__(self) -> str:
        """Write the name as metrics.jsonl has it."""
        of_class = "" if self.class_name is None else f"/{self.class_name}"
        return f"{self.where}{self.name}{of_class}"

    @property
    def metric(self) -> Metric | None:
        """What is known about the metric; None for the user's own."""
        return _LOSS if self.name == "loss" else METRICS.get(self.name)


def metric_of(name: str) -> Metric | None:
    """Return what is known about a name's metric; None for the user's own."""
    return MetricName.read(name).metric


def evaluation_of(name: str) -> str:
    """Return what is evaluated for a value with this name: HERE, CLIENT, RECEIVED, ..."""
    return MetricName.read(name).where


def larger_is_better(figure: str) -> bool:
    """Return whether a figure of metrics.jsonl or summary.json is better when it is larger."""
    metric = metric_of(figure.removeprefix(BEST))
    return metric is not None and metric.larger_is_better


def in_range(name: str, value: float) -> bool:
    """Return whether a metric can have this value; True for a name that is no metric."""
    metric = metric_of(name)
    if metric is None:
        return True
    return metric.low - _ROUNDING <= value <= metric.high + _ROUNDING


def range_text(name: str) -> str:
    """Return a metric's range as text, such as "[0, 1]"."""
    metric = metric_of(name) or _LOSS
    left = "(" if metric.low == -math.inf else "["
    right = ")" if metric.high == math.inf else "]"
    return f"{left}{metric.low:g}, {metric.high:g}{right}"


def require_metrics(names: Iterable[str], kind: Kind | None, num_classes: int, task: str) -> None:
    """Raise a ConfigError if a task cannot have one of these metrics.

    Args:
        names: words of ``evaluation.metrics`` (conf/metrics.py has checked them).
        kind: kind of the task; None for a model without predictions.
        num_classes: C; 0 if it is not known yet.
        task: the task's name in the error.
    """
    for name in names:
        allowed = metrics_of(kind) if kind is not None else []
        if kind is not None and is_own(name):
            continue
        if name not in allowed:
            what = f"a {kind}" if kind is not None else "a model without predictions"
            raise ConfigError(
                f"evaluation.metrics: {name} is not a metric of {what} ({task}); allowed: "
                f"{', '.join(allowed) or 'none, set evaluation.metrics=[]'}"
            )
        if name == "top5_accuracy" and 0 < num_classes <= 5:
            raise ConfigError(
                f"evaluation.metrics: top5_accuracy is always 1 with the {num_classes} classes of "
                f"{task}; leave it out"
            )


def measured_names(names: Iterable[str], class_names: Sequence[str] = ()) -> list[str]:
    """Return the names of all values, and of those of each class if ``class_names`` are given."""
    found = []
    for name in map(row_name, names):
        found.append(name)
        if name in METRICS and METRICS[name].per_class:
            found += [str(MetricName(name, class_name=one)) for one in class_names]
    return found


def row_key(name: str) -> str:
    """Return the name in metrics.jsonl of a reply's ``name``."""
    return str(MetricName.read(name))


# ---- in rows and summaries -----------------------------------------------------------------------


def measured_where(values: Mapping[str, Any]) -> str:
    """Return CLIENT if only clients measure, because the server has no test examples."""

    def is_measured(where: str) -> bool:
        names = (MetricName(name, where) for name in ("accuracy", "loss"))
        return any(values.get(str(name)) is not None for name in names)

    return CLIENT if is_measured(CLIENT) and not is_measured(HERE) else HERE


def shown_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a row or summary, without accuracy, loss and classes.

    The server's metrics, or the clients' if only they measured anything.
    """
    where = measured_where(values)
    known = (*METRICS, *(values.get(OWN) or ()))
    names = {str(MetricName(name, where)) for name in known if name != "accuracy"}
    return {name: value for name, value in values.items() if name in names and value is not None}


def is_of_new_model(text: str, own: Collection[str] = ()) -> bool:
    """Return whether a name of metrics.jsonl is a metric of the new model, the accuracy left out.

    At the server or the clients, over all examples or of one class; ``own``: names of the user's
    own metrics.
    """
    name = MetricName.read(text)
    is_accuracy = name.name == "accuracy" and name.class_name is None
    known = name.name in own or (name.name in METRICS and not is_accuracy)
    return known and name.where in (HERE, CLIENT)


def is_of_own_models(text: str, own: Collection[str] = ()) -> bool:
    """Return whether a name of metrics.jsonl is a metric of clients' own models on their own data.

    Over all classes; ``own``: as above.
    """
    name = MetricName.read(text)
    known = name.name in METRICS or name.name in own
    return known and name.where == PERSONAL and name.class_name is None


def own_metrics(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the user's own metrics in rows."""
    return list(dict.fromkeys(name for row in rows for name in row.get(OWN, ())))


def metric_totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each metric's last value, and its best value as ``best_<name>``.

    Covers the server's evaluation and the clients', without accuracy and loss. If the last
    evaluation lacks a metric, it has no last value, because an older one belongs to another model.
    The user's own metrics have no best value, because nobody said which values are better.
    """
    last: dict[str, float] = {}
    best: dict[str, float] = {}
    own = own_metrics(rows)
    for row in rows:
        if "loss" in row or f"{CLIENT}loss" in row:
            last = {}
        for figure, value in row.items():
            if is_of_new_model(figure, own) and value is not None:
                last[figure] = float(value)
                choose = max if larger_is_better(figure) else min
                best[figure] = choose(best.get(figure, last[figure]), last[figure])
    found: dict[str, float] = {}
    for figure, value in best.items():
        if figure in last:
            found[figure] = last[figure]
        name = MetricName.read(figure)
        if name.class_name is None and name.metric is not None:
            found[f"{BEST}{figure}"] = value
    return found


def figures_of(metrics: Collection[str]) -> list[str]:
    """Return the figures that these metrics (by their names in rows) may add to a summary."""
    found: list[str] = []
    for name in metrics:
        if name != "accuracy":
            for text in (name, str(MetricName(name, CLIENT))):
                found += [text, f"{BEST}{text}"] if name in METRICS else [text]
            found.append(str(MetricName(name, PERSONAL)))
    return found

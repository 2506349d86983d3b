"""The values of ``evaluation.metrics`` by torchmetrics, from one pass over a model's predictions.

A metric of classes (precision, recall, specificity, f1, iou, dice, auroc, average_precision) is the
plain mean over the classes that occur: in labels or predictions, or for auroc, average_precision
and balanced_accuracy in the labels, as in scikit-learn. So classes that a client does not hold do
not lower its value. f1_weighted weighs the classes by their labels. The value of one class compares
this class with the rest; its accuracy is its recall. calibration_error is the expected one with 15
bins. A segmentation's values count the pixels of all images together. With several outputs, a
regression's values cover all of them, or are the mean over outputs (r2, explained_variance,
pearson, spearman).

A value that the examples do not define is left out: auroc of one class, r2 of a single example or
of equal labels, pearson and spearman of equal labels or equal predictions.

A metric of the user's own is a function of all outputs and labels, which are kept for it.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.common.imports import import_torchmetrics
from fedhet.common.metrics import (
    METRICS,
    Kind,
    MetricName,
    is_own,
    measured_names,
    require_metrics,
)
from fedhet.tasks.config import AnyConfig
from fedhet.tasks.losses import BALANCED, Loss, balanced, loss_of, require_logits, weighted
from fedhet.tasks.own_metric import OwnMetric

_BINS = 15  # for the calibration error
_COUNTS = "_counts"  # tp, fp, tn, fn and labels of each class
_BY_SUPPORT = ("auroc", "average_precision", "accuracy")
_AT_LEAST_TWO = ("r2", "explained_variance", "pearson", "spearman")


@dataclass(frozen=True)
class Predictions:
    """Describes a task's outputs and labels.

    classification: logits (B, C) and labels (B,), from 0.
    segmentation: logits (B, C, H, W) and labels (B, H, W).
    regression: values (B,) or (B, k), and labels of the same shape.
    """

    kind: Kind
    class_names: tuple[str, ...] = ()  # in the order of the labels; () for a regression
    num_outputs: int = 1  # k, for a regression
    ignore_index: int | None = None  # a label that does not count (segmentation)

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.class_names)


class MetricSet:
    """Collects a model's outputs batch by batch, and computes the metrics.

    Args:
        names: names of common/metrics.py, or functions ``package.module:function``; () measures
            nothing and costs nothing.
        predictions: describes the outputs.
        per_class: also measure each class, ``f1/<class name>``.
        device: the outputs' device.

    Raises:
        ConfigError: for a metric that the task cannot have, or a function that does not exist.
    """

    def __init__(
        self,
        names: Sequence[str],
        predictions: Predictions,
        *,
        per_class: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        require_metrics(names, predictions.kind, predictions.num_classes, "this task")
        self._words, self._predictions = tuple(dict.fromkeys(names)), predictions
        self._names = tuple(word for word in self._words if not is_own(word))
        self._own = [OwnMetric(word) for word in self._words if is_own(word)]
        self._kept: list[tuple[Tensor, Tensor]] = []  # batches, for the user's own metrics
        self._per_class = per_class and predictions.kind != "regression"
        self._count = 0
        if self._names and not self._own:  # whose function may need what this leaves out
            import_torchmetrics()
        self._collection = _collection(self._names, predictions, device) if self._names else None

    @property
    def names(self) -> list[str]:
        """The names of all possible values."""
        classes = self._predictions.class_names if self._per_class else ()
        return measured_names(self._words, classes)

    def reset(self) -> None:
        """Forget all outputs."""
        self._count, self._kept = 0, []
        if self._collection is not None:
            self._collection.reset()

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Add a batch; shapes as in :class:`Predictions`.

        Raises:
            ConfigError: if the number of logits is not the number of classes.
        """
        if not self._words:
            return
        self._count += len(labels)
        outputs = outputs.detach()
        if self._predictions.kind == "regression":
            outputs, labels = _aligned(outputs, labels, self._predictions.num_outputs)
        elif self._collection is not None:
            require_logits(outputs, self._predictions.num_classes)
        if self._own:
            self._kept.append((outputs.cpu(), labels.cpu()))
        if self._collection is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._collection.update(outputs, labels)

    def compute(self) -> dict[str, float]:
        """Return the values over all batches since the last reset, by name; undefined left out."""
        if self._count == 0:
            return {}
        found = {one.name: one.value(self._kept) for one in self._own}
        if self._collection is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings about undefined values
                if self._predictions.kind == "regression":
                    found |= self._regression(self._collection)
                else:
                    found |= self._by_classes(self._collection)
        return {
            name: found[name] for name in self.names if math.isfinite(found.get(name, math.nan))
        }

    # ---- pieces ------------------------------------------------------------------------------

    def _regression(self, collection: Any) -> dict[str, float]:
        found = {}
        for name in self._names:
            if name not in _AT_LEAST_TWO or self._count > 1:
                found[name] = float(collection[name].compute().double().mean())
        return found

    def _by_classes(self, collection: Any) -> dict[str, float]:
        values = collection.compute()
        if _COUNTS not in values:
            return {name: float(values[name]) for name in self._names}
        tp, fp, _, fn, support = values[_COUNTS].double().unbind(-1)
        in_labels, occurs = support > 0, tp + fp + fn > 0
        found: dict[str, float] = {}
        for name in self._names:
            value = values[_SOURCES.get(name, name)].double()
            present = in_labels if name in (*_BY_SUPPORT, "balanced_accuracy") else occurs
            if name in ("auroc", "specificity"):
                present = present & (support < support.sum())  # some examples have other classes
            if value.ndim == 0:
                found[name] = float(value)
            elif name == "accuracy":
                found[name] = float(tp.sum() / support.sum())
            elif name == "f1_weighted":
                found[name] = float((value * support).sum() / support.sum())
            else:
                found[name] = float(value[present].mean())
            if self._per_class and METRICS[name].per_class:
                by_class = value.masked_fill(~present, math.nan).tolist()
                names = (MetricName(name, class_name=c) for c in self._predictions.class_names)
                found |= dict(zip(map(str, names), by_class, strict=True))
        return found


# Metrics that follow from another metric's values per class.
_SOURCES = {"accuracy": "recall", "balanced_accuracy": "recall", "f1_weighted": "f1", "dice": "f1"}


def _collection(names: Sequence[str], predictions: Predictions, device: torch.device | str) -> Any:
    """Return the torchmetrics of these names."""
    # takes seconds to import, and is needed only if a recipe names metrics
    from torchmetrics import MetricCollection

    builders = _regression_metrics if predictions.kind == "regression" else _class_metrics
    build = builders(predictions)
    needed = [_SOURCES.get(name, name) for name in names]
    without = {"perplexity"} if predictions.kind != "regression" else set(names)
    needed += [_COUNTS] if set(names) - without else []  # C by C: large for tokens
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about memory
        chosen = {name: build[name]() for name in dict.fromkeys(needed)}
    # torchmetrics would group equal states by the first batch and keep the groups: after a batch
    # without mistakes, the share of the first five would always be that of the first.
    return MetricCollection(chosen, compute_groups=False).to(device)


Builders = Mapping[str, Callable[[], Any]]


def _class_metrics(predictions: Predictions) -> Builders:
    from torchmetrics import classification as tm

    size: dict[str, Any] = {
        "num_classes": predictions.num_classes,
        "ignore_index": predictions.ignore_index,
        "validate_args": False,
    }
    each = {**size, "average": "none"}
    return {
        _COUNTS: lambda: tm.MulticlassStatScores(**each),
        "precision": lambda: tm.MulticlassPrecision(**each),
        "recall": lambda: tm.MulticlassRecall(**each),
        "specificity": lambda: tm.MulticlassSpecificity(**each),
        "f1": lambda: tm.MulticlassF1Score(**each),
        "iou": lambda: tm.MulticlassJaccardIndex(**each),
        "auroc": lambda: _of(ranks, tm.MulticlassAUROC)(**each),
        "average_precision": lambda: _of(ranks, tm.MulticlassAveragePrecision)(**each),
        "top5_accuracy": lambda: tm.MulticlassAccuracy(**size, average="micro", top_k=5),
        "cohen_kappa": lambda: tm.MulticlassCohenKappa(**size),
        "mcc": lambda: _with_result(tm.MulticlassConfusionMatrix, matthews)(**size),
        "perplexity": lambda: _perplexity(predictions.ignore_index),
        "calibration_error": lambda: _of(probabilities, tm.MulticlassCalibrationError)(
            **size, n_bins=_BINS
        ),
    }


def _with_result(metric: type, result: Callable[[Tensor], Tensor]) -> Any:
    """Return a metric whose value is a function of another one's."""

    def compute(self: Any) -> Tensor:
        return result(metric.compute(self))  # type: ignore[attr-defined]

    return type(metric.__name__, (metric,), {"compute": compute})


def matthews(counts: Tensor) -> Tensor:
    """Return Matthews' correlation of labels and predictions; NaN if one of them is constant.

    For two classes torchmetrics would then return the share of right predictions.

    Args:
        counts: number of examples (C, C), by label and prediction.
    """
    counts = counts.double()
    labels, predicted, total = counts.sum(1), counts.sum(0), counts.sum()
    covariance = counts.trace() * total - labels @ predicted
    spread = (total**2 - labels @ labels) * (total**2 - predicted @ predicted)
    return covariance / spread.sqrt()


def probabilities(logits: Tensor) -> Tensor:
    """Return the softmax of logits (B, C, ...)."""
    return logits.double().softmax(dim=1)


def ranks(logits: Tensor) -> Tensor:
    """Return numbers in [0, 1] in the order of the softmax, even if all its digits are those of 1.

    Each is 1/2 + atan(o) / pi of a class's log odds o: its logit less the log of the others' sum of
    exponentials. The softmax of a gap above 37 is 1, so confident models would have ties.
    """
    logits = logits.double()
    best = logits.argmax(dim=1, keepdim=True)
    of_others = logits.scatter(1, best, -math.inf).logsumexp(dim=1, keepdim=True)
    whole = logits.logsumexp(dim=1, keepdim=True)
    rest = whole + torch.log1p(-(logits - whole).exp())  # exact up to a probability of 1/2
    odds = logits - rest.scatter(1, best, of_others)
    # equal scores from different sums may differ in the last digit, and would not be a tie
    return (0.5 + odds.atan() / math.pi).round(decimals=12)


def _of(scores: Callable[[Tensor], Tensor], metric: type) -> Any:
    """Return a metric of scores in [0, 1] of the logits, whatever their range.

    If all logits of a batch lie in [0, 1], the torchmetrics class takes them for probabilities.
    """

    def update(self: Any, logits: Tensor, labels: Tensor) -> None:
        metric.update(self, scores(logits), labels)  # type: ignore[attr-defined]

    return type(metric.__name__, (metric,), {"update": update})


def _perplexity(ignore_index: int | None) -> Any:
    """Return exp of the mean cross-entropy of logits (B, C, ...) and labels (B, ...)."""
    from torchmetrics.text import Perplexity

    class OfPlaces(Perplexity):
        def update(self, logits: Tensor, labels: Tensor) -> None:
            super().update(logits.flatten(2).transpose(1, 2), labels.flatten(1))

    return OfPlaces(ignore_index=ignore_index)


def _regression_metrics(predictions: Predictions) -> Builders:
    from torchmetrics import regression as tm

    from fedhet.tasks.fit_metrics import R2, ExplainedVariance, Pearson, Spearman

    outputs = predictions.num_outputs
    return {
        "mae": tm.MeanAbsoluteError,
        "mse": tm.MeanSquaredError,
        "rmse": lambda: tm.MeanSquaredError(squared=False),
        "mape": tm.MeanAbsolutePercentageError,
        "smape": tm.SymmetricMeanAbsolutePercentageError,
        "r2": R2,
        "explained_variance": ExplainedVariance,
        "pearson": Pearson,
        "spearman": lambda: Spearman(num_outputs=outputs),
    }


def _aligned(outputs: Tensor, labels: Tensor, num_outputs: int) -> tuple[Tensor, Tensor]:
    """Return outputs and labels of a regression as (B,) or (B, k), in float32 or float64."""
    shape = (len(labels),) if num_outputs == 1 else (len(labels), num_outputs)
    for what, values in (("outputs", outputs), ("targets", labels)):
        if values.numel() != math.prod(shape):
            raise ConfigError(
                "evaluation.metrics of a regression compare outputs and targets of the shape "
                f"{shape}, but the {what} have {tuple(values.shape)}: give the model as many "
                "outputs (task.model_options.outputs, if its function has that parameter), name "
                "the module that makes them all in task.classifier, or set evaluation.metrics=[]"
            )
    kind = torch.float64 if outputs.dtype == torch.float64 else torch.float32
    return outputs.reshape(shape).to(kind), labels.reshape(shape).to(kind)


class Measured(ABC):
    """A task whose predictions are measured."""

    name: str
    config: AnyConfig

    @property
    @abstractmethod
    def class_names(self) -> tuple[str, ...]:
        """The classes in the order of their labels; none for a regression."""

    @property
    def any_label(self) -> bool:
        """Whether labels may differ from 0 to C - 1, and outputs from logits of C classes."""
        return False

    @property
    @abstractmethod
    def predictions(self) -> Predictions | None:
        """Describes outputs and labels; None if nothing is predicted."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar, without weights of the classes."""

    def training_loss(self, counts: Callable[[], Sequence[int]]) -> Loss:
        """Return the loss that a client trains on.

        Args:
            counts: gives the client's number of training examples of each class.
        """
        weights, config = self.config.class_weights, self.config
        if weights is None:
            return self.loss
        known = balanced(counts()) if weights == BALANCED else torch.tensor(weights)
        if len(known) != len(self.class_names):
            raise ConfigError(
                f"task.class_weights has {len(known)} weights, and there are "
                f"{len(self.class_names)} classes: give one for each, in their order"
            )
        return weighted(loss_of("classification", config.loss), known)

    def metric_set(
        self, names: Sequence[str], *, per_class: bool, device: torch.device | str
    ) -> MetricSet | None:
        """Return the collector of these ``evaluation.metrics``; None without a name.

        Raises:
            ConfigError: for a metric that the task cannot have.
        """
        if not names:
            return None
        known = self.predictions
        size = 0 if known is None else known.num_classes
        require_metrics(names, known.kind if known else None, size, f"task={self.name}")
        assert known is not None
        return MetricSet(names, known, per_class=per_class, device=device)

"""Checks of the keys that name metrics: of evaluation, early stopping, best model, objective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedhet.common.errors import ConfigError, did_you_mean
from fedhet.common.metrics import (
    BEST,
    CLIENT,
    HERE,
    METRICS,
    PERSONAL,
    RECEIVED,
    MetricName,
    figures_of,
    is_own,
    is_taken,
    own_names,
    row_name,
)
from fedhet.common.outside import is_name
from fedhet.conf.schema import FIGURES

_SWITCHES = {CLIENT: "evaluation.clients=true", RECEIVED: "evaluation.received=true"}
_ALL_SWITCHES = {**_SWITCHES, PERSONAL: "evaluation.model=clients"}
_SUMMED = ("accuracy", "loss")  # what a secure sum has of metrics
_LOCAL = "strategy/differential_privacy=local"


def check_metric_words(words: Sequence[str]) -> None:
    """Refuse words of ``evaluation.metrics`` that are no metric, or two of one name."""
    for word in words:
        if is_own(word):
            _check_own(word, words)
        else:
            _require("evaluation.metrics", word, METRICS)


def check_metrics(values: Mapping[str, Any]) -> None:
    """Refuse unknown metrics, and keys that name one which the run does not measure."""
    words = values["evaluation"]["metrics"]
    check_metric_words(words)
    names = [row_name(word) for word in words]
    if values["evaluation"]["per_class"] and not names:
        raise ConfigError(
            "evaluation.per_class=true, but evaluation.metrics=[] names no metric: name some, such "
            "as evaluation.metrics=[accuracy]"
        )
    sent = _sent(values["strategy"], names)
    if not sent and (model := values["evaluation"]["model"]) != "global":
        raise ConfigError(
            f"evaluation.model={model}: under strategy/differential_privacy=local clients send no "
            "metrics of their models; set evaluation.model=global"
        )
    measured = _measured(values["evaluation"], sent)
    stopping = values["early_stopping"]
    kind = values["task"].get("kind", "classification")
    _require("early_stopping.metric", stopping["metric"], measured, kind, more=_MORE)
    best = values["checkpoint"]["best"]
    if isinstance(best, str):
        _require("checkpoint.best", best, measured, kind, more=f"{_MORE}; or true or false")
    figures = _figures(values["evaluation"], names, sent)
    _require("objective", values["objective"], figures, kind, _MORE, _ALL_SWITCHES)
    _check_stopping(values)
    _check_direction(values)


def _check_own(word: str, words: Sequence[str]) -> None:
    """Refuse a function that cannot be found, or whose name says something else in rows."""
    start, name = f"evaluation.metrics={word}", row_name(word)
    if not is_name(word) or not name.isidentifier():
        raise ConfigError(
            f"{start} names no function: write package.module:function, such as "
            "my_project.metrics:within_ten_percent"
        )
    if is_taken(name):
        raise ConfigError(
            f"{start}: a metric has its function's name, but metrics.jsonl or summary.json already "
            f"use {name}, or names that begin with it; rename the function"
        )
    if same := [one for one in words if one != word and row_name(one) == name]:
        raise ConfigError(
            f"{start} and {same[0]} would both be {name} in metrics.jsonl; rename a function"
        )


def _check_direction(values: Mapping[str, Any]) -> None:
    """Refuse to go by a metric of the user's own without being told which values are better."""
    own, stopping = own_names(values["evaluation"]["metrics"]), values["early_stopping"]
    metric, best = stopping["metric"], values["checkpoint"]["best"]
    told = "set early_stopping.mode=max (larger values are better) or min"
    if isinstance(best, str) and best != metric and MetricName.read(best).name in own:
        raise ConfigError(
            f"checkpoint.best={best} is your own function: set checkpoint.best=true and "
            f"early_stopping.metric={best}, and {told}"
        )
    goes_by = stopping["patience"] is not None or best in (True, metric)
    if goes_by and MetricName.read(metric).name in own and stopping["mode"] == "auto":
        raise ConfigError(
            f"early_stopping.metric={metric} is your own function, but "
            f"early_stopping.mode=auto knows only fedhet's metrics: {told}"
        )


_MORE = "metrics that evaluation.metrics names are allowed, too"


def _require(
    key: str,
    value: str,
    allowed: Iterable[str],
    kind: str = "classification",
    more: str = "",
    switches: Mapping[str, str] = _SWITCHES,
) -> None:
    """Refuse a value that is not allowed; of a regression no accuracy is named as an option.

    The defaults name one, and are refused only where a run would go by it (server_app/run.py).
    """
    options = list(allowed)
    if value in options:
        return
    if kind == "regression":
        options = [name for name in options if not name.endswith("accuracy")]
    name = MetricName.read(value.removeprefix(BEST))
    base = str(replace(name, where=HERE)) if name.where in (HERE, *switches) else value
    steps = [f"add {base} to evaluation.metrics"] if base not in options else []
    steps += [f"set {switches[name.where]}"] if name.where in switches else []
    if more and base in (*METRICS, *_SUMMED, *options) and steps:
        raise ConfigError(
            f"{key}={value} is not measured: {', and '.join(steps)}; allowed: {', '.join(options)}"
        )
    near = did_you_mean(value, list(METRICS) if more == "" else options)
    raise ConfigError(
        f"{key}={value} is unknown{near}; allowed: {', '.join(options)}"
        + (f" ({more})" if more else "")
    )


def _sent(strategy: Mapping[str, Any], metrics: Sequence[str]) -> list[str]:
    """Return which of the recipe's ``metrics`` clients send with their replies."""
    hidden = hides_scores(strategy)
    if hidden == _LOCAL:
        return []
    return list(_SUMMED if hidden else _with_summed(metrics))


def hides_scores(strategy: Mapping[str, Any]) -> str | None:
    """Return what keeps a single client's scores from the server, as a word; None: nothing."""
    privacy = strategy.get("differential_privacy") or {}
    if str(privacy.get("_target_")).endswith(".local_privacy.Local"):
        return _LOCAL
    return "strategy/secure_aggregation" if strategy.get("secure_aggregation") else None


def _with_summed(metrics: Sequence[str]) -> list[str]:
    return list(dict.fromkeys((*_SUMMED, *metrics)))


def _measured(evaluation: Mapping[str, Any], sent: Sequence[str]) -> list[str]:
    """Return the names of metrics.jsonl that a run's evaluations have; clients send ``sent``."""
    of_clients = evaluation["model"] == "clients"
    here = _with_summed([row_name(word) for word in evaluation["metrics"]])
    names = list(sent) if of_clients else here
    at_clients = [MetricName(name, CLIENT) for name in names] if evaluation["clients"] else []
    received = [MetricName(name, RECEIVED) for name in sent] if evaluation["received"] else []
    return [*names, *map(str, [*at_clients, *received])]


def _figures(
    evaluation: Mapping[str, Any], metrics: Sequence[str], sent: Sequence[str]
) -> list[str]:
    """Return the figures that a run's summary may have; clients send ``sent`` of their models."""

    def is_measured(figure: str) -> bool:
        name = MetricName.read(figure.removeprefix(BEST))
        if name.where == PERSONAL:
            return evaluation["model"] != "global" and name.name in sent
        return evaluation["clients"] or name.where != CLIENT

    return list(filter(is_measured, dict.fromkeys((*FIGURES, *figures_of(metrics)))))


def _check_stopping(values: Mapping[str, Any]) -> None:
    """Refuse early stopping and a best model where there is no evaluation to go by."""
    evaluation, patience = values["evaluation"], values["early_stopping"]["patience"]
    best = values["checkpoint"]["best"]
    chosen = "true" if best is True else best
    key = f"early_stopping.patience={patience}" if patience else f"checkpoint.best={chosen}"
    if not (patience or best):
        return
    if evaluation["every"] == 0:
        raise ConfigError(
            f"{key} goes by evaluations, but evaluation.every=0 has none before the end; set "
            "evaluation.every to 1 or more"
        )
    name = MetricName.read(values["early_stopping"]["metric"] if best is True else str(best))
    if best and name.where == RECEIVED:
        raise ConfigError(
            f"checkpoint.best={chosen} goes by {name}, which is measured before the round and not "
            "on the model that is kept: choose another metric, such as "
            f"{replace(name, where=CLIENT)}"
        )
    if best and evaluation["model"] == "clients":
        raise ConfigError(
            f"checkpoint.best={chosen} keeps the server's model, and evaluation.model=clients "
            "scores the clients' own; set evaluation.model=both or global, or checkpoint.best=false"
        )

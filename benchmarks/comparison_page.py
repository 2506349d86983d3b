"""What docs/results/comparison.md shows of the runs: tests, ranks, tables and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import spearmanr

from docs.generator.markdown import table
from docs.generator.measure import stored as stored_cost
from fedhet.report.blocks import Chart
from fedhet.report.charts import CONFIG, rows_of
from fedhet.report.colors import INK
from fedhet.report.ranks import Ranks, ranks_chart
from fedhet.report.statistics import Estimate

FIRST = ("digits", "heart_disease", "synthetic", "mnist_cameras", "cifar10", "imdb")  # rule 6
KINDS = {  # what the clients of a task differ by
    "labels": (
        *("digits", "digits_two_classes", "mnist", "mnist_dirichlet", "mnist_many", "mnist_cnn"),
        *("cifar10", "cifar10_two_classes", "cifar10_cnn", "imdb", "imdb_many", "breast_cancer"),
    ),
    "inputs": ("digits_cameras", "mnist_cameras", "mnist_cnn_cameras", "cifar10_cameras"),
    "functions": ("synthetic", "synthetic_00", "heart_disease"),
    "nothing": ("mnist_iid",),
}
FORMS = {  # the columns of a group's first table
    "mean rank": "{rank:.2f}",
    "first six, others": "{rank_first:.1f}, {rank_others:.1f}",
    "less FedAvg": "{gap:+.1f}",
    "labels": "{labels:+.1f}",
    "inputs": "{inputs:+.1f}",
    "functions": "{functions:+.1f}",
    "above, below": "{above}, {below}",
    "bytes": "{bytes:.2f}",
    "CPU": "{cpu:.1f}",
    "state at a client": "{client_state:.2f}",
    "at the server": "{server_state:.2f}",
}
_MOST_COLUMNS = 5  # tasks in a table
_LEAST_TASKS = 3  # of a test
_FAR = 20.0  # points to FedAvg: the end of the picture's colours
_WHITE = 12.0  # points from which the picture's numbers are white


def summarised(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return each group's tests, and each method's mean ranks, differences to FedAvg and costs."""
    runs = pd.DataFrame(found["runs"])
    tests: list[dict[str, Any]] = []
    methods: list[dict[str, Any]] = []
    for group, own in runs.groupby("group", sort=False):
        scores = own.groupby(["task", "method"], sort=False)["accuracy"].mean().unstack().round(5)
        ranks = {name: Ranks.of(part) for name, part in _scopes(scores)}
        tests += [{"group": group, "scope": name, **_test(ranks, name)} for name in ranks]
        methods += [
            {"group": group, **_method(own, ranks, str(one))} for one in ranks["all"].mean.index
        ]
    return {"tests": tests, "methods": methods}


def _scopes(scores: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield all tasks, the first six and the others, as far as there are some."""
    is_first = scores.index.isin(FIRST)
    yield "all", scores
    if min(is_first.sum(), (~is_first).sum()) >= _LEAST_TASKS:
        yield from {"first": scores[is_first], "others": scores[~is_first]}.items()


def _test(ranks: Mapping[str, Ranks], scope: str) -> dict[str, Any]:
    one = ranks[scope]
    found = {
        "tasks": one.settings,
        "methods": len(one.mean),
        "chi2": round(one.friedman, 3),
        "p": float(f"{one.p_value:.3g}"),
        "critical_difference": round(one.critical_difference, 3),
    }
    if scope == "others":
        first, others = ranks["first"].mean, one.mean
        alike = spearmanr(first, others[first.index])
        found |= {"spearman": round(float(alike.statistic), 3)}
        found |= {"spearman_p": float(f"{alike.pvalue:.3g}")}
    return found


def _method(own: pd.DataFrame, ranks: Mapping[str, Ranks], method: str) -> dict[str, Any]:
    by_seed = own.pivot(index=["task", "seed"], columns="method", values="accuracy")
    gaps = by_seed[method] - by_seed["fedavg"]
    signs = [Estimate(list(each)).sign for _, each in gaps.groupby("task")]
    tasks = gaps.index.get_level_values("task")
    of_kind = {kind: gaps[tasks.isin(names)] for kind, names in KINDS.items()}
    sent = own.assign(sent=own["bytes_up"] + own["bytes_down"])
    kept = stored_cost(method)
    rank = {"all": "rank", "first": "rank_first", "others": "rank_others"}
    return {
        "method": method,
        **{rank[scope]: round(float(one.mean[method]), 3) for scope, one in ranks.items()},
        "gap": round(100 * float(gaps.mean()), 3),
        **{kind: round(100 * float(g.mean()), 3) for kind, g in of_kind.items() if len(g)},
        "above": signs.count(1),
        "below": signs.count(-1),
        "bytes": _ratio(sent, "sent", method),
        "cpu": _ratio(own, "cpu_seconds", method),
        "client_state": round(sum(kept.client_state.values()), 2),
        "server_state": round(sum(kept.server_state.values()), 2),
    }


def _ratio(runs: pd.DataFrame, column: str, method: str) -> float:
    """Return a cost as a multiple of FedAvg's, the median over the tasks."""
    means = runs.pivot_table(index="task", columns="method", values=column)
    return round(float((means[method] / means["fedavg"]).median()), 2)


def tables(found: Mapping[str, Any], group: str) -> str:
    """Return a group's tables of docs/results/comparison.md, with the comments that name them.

    After the summary, the methods' differences to FedAvg on each task.
    """
    methods = [one for one in found["methods"] if one["group"] == group]
    words = {label: " ".join(re.findall(r"{(\w+)", form)) for label, form in FORMS.items()}
    words = {label: keys for label, keys in words.items() if set(keys.split()) <= methods[0].keys()}
    rows = [[one["method"], *(FORMS[label].format(**one) for label in words)] for one in methods]
    parts = [_table(f"methods group={group}", {"method": "by method", **words}, rows)]
    names = [one["method"] for one in methods if one["method"] != "fedavg"]
    scores, shown = _scores(found, group), _by_kind(found["tasks"])
    for begin in range(0, len(shown), _MOST_COLUMNS):
        tasks = shown[begin : begin + _MOST_COLUMNS]
        rows = [[name, *(_gap_text(scores, name, task) for task in tasks)] for name in names]
        words = {task: f"task={task} accuracy% [] less method=fedavg" for task in tasks}
        parts.append(_table(f"runs group={group}", {"method": "by method", **words}, rows))
    return "\n\n".join(parts)


def tasks_table(found: Mapping[str, Any]) -> str:
    """Return FedAvg's accuracy on each task, of the global model and of the clients' own."""
    tasks = _by_kind(found["tasks"])
    means = {
        name: _scores(found, group).loc["fedavg"].mean(axis="columns")
        for name, group in (("the global model", "global"), ("clients' own", "personal"))
    }
    rows = [[task, *(f"{mean[task]:.1f}" for mean in means.values())] for task in tasks]
    words = {
        "task": "by task",
        "the global model": "group=global accuracy%",
        "clients' own": "group=personal accuracy%",
    }
    return _table("runs method=fedavg", words, rows)


def _by_kind(tasks: Sequence[str]) -> list[str]:
    return [task for kind in KINDS.values() for task in kind if task in tasks]


def _scores(found: Mapping[str, Any], group: str) -> pd.DataFrame:
    """Return the accuracy in % by method and task (rows) and seed (columns)."""
    runs = pd.DataFrame(found["runs"]).query("group == @group")
    return 100 * runs.pivot(index=["method", "task"], columns="seed", values="accuracy")


def _gap(scores: pd.DataFrame, method: str, task: str) -> Estimate:
    return Estimate(list(scores.loc[(method, task)] - scores.loc[("fedavg", task)]))


def _gap_text(scores: pd.DataFrame, method: str, task: str) -> str:
    one = _gap(scores, method, task)
    text = f"{one.mean:+.1f} {one.interval_text(1) if one.interval else '[0.0, 0.0]'}"
    return f"**{text}**" if one.sign else text


def _table(source: str, words: Mapping[str, str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"{label} = {text}" for label, text in words.items()]
    comment = "\n".join([f"<!-- from: ../../benchmarks/comparison.json#{source}", *lines])
    return f"{comment} -->\n\n{table(list(words), rows)}"


def draw(found: Mapping[str, Any], folder: Path) -> None:
    """Write the pictures of each group: the mean ranks, and the differences to FedAvg by task."""
    runs = pd.DataFrame(found["runs"])
    for group, own in runs.groupby("group", sort=False):
        scores = own.groupby(["task", "method"], sort=False)["accuracy"].mean().unstack().round(5)
        ranks = Ranks.of(scores)
        ranks_chart(ranks, Path(f"comparison_{group}")).save(folder)
        methods = [str(one) for one in ranks.mean.index if one != "fedavg"]
        _gaps_chart(found, str(group), methods).save(folder)


def _gaps_chart(found: Mapping[str, Any], group: str, methods: Sequence[str]) -> Chart:
    scores, tasks = _scores(found, group), _by_kind(found["tasks"])
    cells = []
    for method in methods:
        for task in tasks:
            one = _gap(scores, method, task)
            text = f"{one.mean:+.1f}" if one.sign else "·"
            cells.append({"method": method, "task": task, "points": one.mean, "text": text})
    frame = pd.DataFrame(cells)
    rows = {"field": "method", "type": "nominal", "title": None, "sort": list(methods)}
    columns = {"field": "task", "type": "nominal", "title": None, "sort": tasks}
    columns |= {"axis": {"labelAngle": -45, "labelLimit": 0}}
    hue = {"field": "points", "type": "quantitative", "title": "points to FedAvg"}
    hue |= {
        "scale": {"scheme": "blueorange", "reverse": True, "domain": [-_FAR, _FAR], "clamp": True}
    }
    is_dark = f"abs(datum.points) > {_WHITE}"
    ink = {"condition": {"test": is_dark, "value": "white"}, "value": INK}
    layers = [
        {"mark": {"type": "rect", "tooltip": True}, "encoding": {"color": hue}},
        {
            "mark": {"type": "text", "fontSize": 10},
            "encoding": {"text": {"field": "text"}, "color": ink},
        },
    ]
    spec = {
        "width": {"step": 34},
        "height": {"step": 20},
        "encoding": {"x": columns, "y": rows},
        "layer": layers,
        "config": CONFIG,
    }
    caption = "Differences to FedAvg; a dot where the interval holds zero."
    return Chart(caption, {"": spec}, {f"comparison_{group}_gaps": spec}, rows_of(frame))

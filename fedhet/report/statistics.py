"""The numbers of a table: a figure of each run, and its mean and spread over the seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fedhet.common.metrics import evaluation_of, is_of_new_model, larger_is_better, metric_of
from fedhet.common.results import ROUNDS_WITHOUT_ROWS
from fedhet.report.names import column_title
from fedhet.report.run_data import Run

LEVEL = 0.95  # of confidence intervals
ROUNDING = 1e-9  # of a score: differences that are less come from the order of sums
LATE_EVALUATIONS = 5
ACCURACIES = ("accuracy", "best_accuracy", "late_accuracy", "client_accuracy")
TO_TARGET = ("rounds_to", "bytes_to", "seconds_to")
NAMES = {
    "accuracy": "final accuracy",
    "best_accuracy": "best accuracy",
    "late_accuracy": "mean accuracy of the last {} evaluations",
    "rounds_to": "rounds to",
    "bytes_to": "MB to",
    "seconds_to": "simulated seconds to",
    "loss": "final loss",
    "client_accuracy": "final accuracy of the output model at the clients",
    "client_loss": "final loss of the output model at the clients",
}


class Value(NamedTuple):
    """A run's figure; only a lower bound if the target is not reached."""

    number: float
    reached: bool = True


@dataclass(frozen=True)
class Figure:
    """What a table shows of each run."""

    name: str  # one of NAMES, or a metric of metrics.jsonl such as f1, or best_f1
    target: float | None = None  # the accuracy to reach, of TO_TARGET
    percent: bool = False  # of accuracies
    last_round: int | None = None  # later rounds are left out
    evaluations: int = LATE_EVALUATIONS  # that late_accuracy is the mean of
    targets: tuple[float, ...] = ()  # several, each of which a table has

    @property
    def title(self) -> str:
        """The figure in words."""
        column = self.name.removeprefix("best_")
        words = column_title(column) if column == self.name else f"best {column_title(column)}"
        words = NAMES.get(self.name, words).replace("{}", str(self.evaluations))
        targets = self.targets if self.target is None else (self.target,)
        words = " ".join(filter(None, [words, ", ".join(map(percent, targets))]))
        return f"{words} (%)" if self.name in ACCURACIES and self.percent else words

    @property
    def larger_is_better(self) -> bool:
        """Whether a larger figure is better than a smaller one."""
        column = self.name.removeprefix("best_")
        return self.name in ACCURACIES or (
            metric_of(column) is not None and larger_is_better(column)
        )

    def of(self, run: Run) -> Value | None:
        """Return the run's figure; None if it was not measured."""
        column = self.name.removeprefix("best_")
        if metric_of(column) is None and self.name in NAMES:
            column = "accuracy"  # of which all other figures are
        last = math.inf if self.last_round is None else self.last_round
        points = [(round, value) for round, value in run.points(column) if round <= last]
        of_all_rounds = self.name in TO_TARGET or self.name.startswith("best_")
        if not points or (of_all_rounds and run.summary.get(ROUNDS_WITHOUT_ROWS)):
            return None
        if self.target is not None and self.name in TO_TARGET:
            hit = next((round for round, value in points if value >= self.target), None)
            end = points[-1][0] if hit is None else hit
            spent = _spent(self.name, run, end)
            return None if spent is None else Value(spent, reached=hit is not None)
        scale = 100.0 if self.percent and self.name in ACCURACIES else 1.0
        values = [value for _, value in points]
        if self.name.startswith("best_"):
            return Value((max if larger_is_better(column) else min)(values) * scale)
        if self.name == "late_accuracy":
            late = trained(points)[-self.evaluations :]
            return Value(statistics.fmean(late) * scale)
        if points[-1][0] < _last_evaluation(run, column, last):
            return None  # the last model has no value, as the R2 of a constant
        return Value(values[-1] * scale)


def trained(points: Sequence[tuple[int, float]]) -> list[float]:
    """Return the values of a column after round 0, or those of round 0 without others."""
    return [value for round, value in points if round > 0] or [value for _, value in points]


def _last_evaluation(run: Run, column: str, last: float) -> int:
    """Return the last round with the evaluation that a column's values come from; -1 for none."""
    names = [f"{evaluation_of(column)}{name}" for name in ("accuracy", "loss")]
    rounds = (round for name in names for round, _ in run.points(name) if round <= last)
    return max(rounds, default=-1)


def _spent(name: str, run: Run, last: int) -> float | None:
    """Return the rounds, megabytes or simulated seconds until a round; None: not measured."""
    if name == "rounds_to":
        return float(last)
    column, unit = ("bytes", 1e6) if name == "bytes_to" else ("simulated_seconds", 1.0)
    found = run.spent(column).get(last)
    return None if found is None else found / unit


def measured_metrics(runs: Sequence[Run]) -> list[str]:
    """Return the metrics of evaluation.metrics that runs have, by their names in metrics.jsonl."""
    own = {name for run in runs for name in run.own_metrics}
    names = dict.fromkeys(name for run in runs for name in run.columns)
    return [name for name in names if is_of_new_model(name, own)]


@dataclass(frozen=True)
class Estimate:
    """A figure over the seeds, with its confidence interval by Student's t.

    One number has no interval, and neither have equal ones, which say nothing of their spread.
    """

    numbers: Sequence[float]  # independent, one of each run that has it
    seeds: Sequence[int | None] = ()  # of the numbers
    bounds: Sequence[float] = ()  # lower bounds, of the runs that have not reached the target
    most: float = math.inf  # numbers lie in [0, most], and so does the interval
    scale: float | None = None  # of the scores that these are differences of; None: of the numbers
    counts: bool = False  # of rounds, MB or seconds: 5 is shown as such, and not as 5.0

    @property
    def count(self) -> int:
        """How many runs there are."""
        return len(self.numbers) + len(self.bounds)

    @cached_property
    def mean(self) -> float:
        """The mean; if a run has not reached the target, the smallest lower bound."""
        return min(self.bounds) if self.bounds else statistics.fmean(self.numbers)

    @property
    def rounding(self) -> float:
        """Differences that are less come from the order of sums."""
        return ROUNDING * (max(map(abs, self.numbers)) if self.scale is None else self.scale)

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """The ends of the interval."""
        if self.bounds or self.count < 2:
            return None
        if max(self.numbers) - min(self.numbers) <= self.rounding:
            return None
        from scipy.stats import ttest_1samp  # half a second, which --help does without

        low, high = ttest_1samp(self.numbers, 0).confidence_interval(LEVEL)
        if self.most < math.inf:
            low, high = max(0.0, low), min(self.most, high)
        return float(low), float(high)

    @property
    def sign(self) -> int:
        """1 or -1 if the interval lies above or below 0, else 0."""
        low, high = self.interval or (0.0, 0.0)
        return int(low > 0) - int(high < 0)

    @property
    def is_seen(self) -> bool:
        """Whether the mean is other than 0 beyond the spread, or in all of several runs."""
        everywhere = not self.interval and self.count > 1 and abs(self.mean) > self.rounding
        return self.sign != 0 or everywhere

    def minus(self, other: Estimate) -> Estimate | None:
        """Return the difference over the seeds that both have; None without any."""
        theirs = dict(zip(other.seeds, other.numbers, strict=True))
        pairs = zip(self.seeds, self.numbers, strict=True)
        gaps = {seed: number - theirs[seed] for seed, number in pairs if seed in theirs}
        scale = max(map(abs, [*self.numbers, *other.numbers]), default=0.0)
        return Estimate(list(gaps.values()), list(gaps), scale=scale) if gaps else None

    def text(self, digits: int) -> str:
        """Return ``mean ± spread``, or ``> bound (k of n reached)``."""
        if self.count > 1 and not self.bounds:
            return f"{self.mean:.{digits}f} ± {statistics.stdev(self.numbers):.{digits}f}"
        whole = self.counts and digits == 1 and self.mean.is_integer()
        number = f"{self.mean:.{0 if whole else digits}f}"
        reached = f"{len(self.numbers)} of {self.count}"
        return f"> {number} ({reached} reached)" if self.bounds else number

    def interval_text(self, digits: int, sign: str = "") -> str:
        """Return ``[1.2, 4.9]``, or a dash."""
        if self.interval is None:
            return "-"
        low, high = self.interval
        return f"[{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def estimate(figure: Figure, runs: Iterable[Run]) -> Estimate | None:
    """Return the figure over the runs of a cell; None without any."""
    values = [(run.seed, value) for run in runs if (value := figure.of(run)) is not None]
    reached = [(seed, value.number) for seed, value in values if value.reached]
    bounds = [value.number for _, value in values if not value.reached]
    most = math.inf if figure.name not in ACCURACIES else 100.0 if figure.percent else 1.0
    counts = figure.name in TO_TARGET
    seeds, numbers = [seed for seed, _ in reached], [number for _, number in reached]
    return Estimate(numbers, seeds, bounds, most, counts=counts) if values else None


def mean_text(numbers: Sequence[float], digits: int = 3) -> str:
    """Return ``mean ± spread`` of numbers, one of each run; a dash without any."""
    return Estimate(numbers).text(digits) if numbers else "-"


def decimals(figure: Figure, means: Iterable[float], of_percent: int, least: int = 2) -> int:
    """Return with how many decimals the means of a figure are shown.

    Accuracies in percent have ``of_percent``. Losses and errors have ``least`` or more: the
    smallest shows three digits.
    """
    if figure.name in ACCURACIES:
        return of_percent if figure.percent else 4
    smallest = min((abs(mean) for mean in means if mean), default=1.0)
    if figure.name in TO_TARGET:
        return max(1, 1 + math.ceil(-math.log10(smallest)))
    return max(least, 2 + math.ceil(-math.log10(smallest)))


def percent(share: float) -> str:
    """Return an accuracy in [0, 1] as percent, without needless zeros."""
    return f"{100 * share:.4g} %"


def sensible_targets(bests: Sequence[float]) -> list[float]:
    """Return about 50, 80 and 95 % of the best accuracy, rounded down to whole percents."""
    best = max(bests, default=0.0)
    step = 0.01 if best >= 0.1 else 0.001
    # 1e-9: a product that is a whole percent must not fall to the one below
    found = [round(math.floor(best * s / step + 1e-9) * step, 4) for s in (0.5, 0.8, 0.95)]
    return sorted({target for target in found if target > 0})

"""What a sweep will be, before it runs: how many jobs, and what tells them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fedhet.common.errors import ConfigError
from fedhet.conf import explain_words
from fedhet.conf.check import check_sweep, checked
from fedhet.runtimes.resources import check_machine
from fedhet.sweep.method_keys import is_single
from fedhet.sweep.optuna_search import check_search, is_search

_MOST_VALUES = 1000
_MOST_CHECKED = 100  # jobs: composing one takes a tenth of a second


@dataclass(frozen=True)
class SweepPlan:
    """The jobs of a sweep."""

    total: int | None  # how many jobs there are; None if only the sweeper knows
    batch_size: int | None  # how many of them the sweeper hands to the launcher at once, at most
    varied: Sequence[str]  # the keys that have more than one value


def plan_sweep(
    words: Sequence[str], objective: str, sweeper: Mapping[str, Any], recipe: DictConfig
) -> SweepPlan:
    """Return what a sweep will be; refuse keys of one run, and a sweep that could only fail.

    ``recipe`` is composed without the swept words.
    """
    given = {word.partition("=")[0].lstrip("+") for word in words}
    if "results_dir" in given:
        raise ConfigError(
            "results_dir is the folder of one run; set hydra.sweep.dir, the folder of all of them"
        )
    if "resume" in given:
        raise ConfigError("resume is for one run; to continue a sweep: fedhet -m --resume FOLDER")
    check_search(objective, sweeper)
    hydra = GlobalHydra.instance()
    loader = hydra.config_loader() if hydra.is_initialized() else None
    parser = OverridesParser.create(loader)
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    overrides = parser.parse_overrides([*params, *words])  # an experiment file's, then the typed
    last = {one.get_key_element(): one for one in overrides}
    swept = {key: one for key, one in last.items() if one.is_sweep_override()}
    check_sweep(recipe, {key.lstrip("+"): _values_of(one) for key, one in swept.items()})
    varied = [key for key, override in swept.items() if not is_single(override)]
    if is_search(sweeper):
        trials, batch = sweeper.get("n_trials"), sweeper.get("n_jobs")
        return SweepPlan(int(trials) if trials else None, int(batch) if batch else None, varied)
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    total = len(jobs)
    if loader is not None and total <= _MOST_CHECKED:
        _check_jobs(loader, recipe, jobs)
    batch_size = min(total, int(sweeper.get("max_batch_size") or total))
    return SweepPlan(total, batch_size, varied)


def _check_jobs(loader: ConfigLoader, recipe: DictConfig, jobs: Sequence[Sequence[str]]) -> None:
    """Refuse a sweep of which a job's values do not fit together."""
    for number, words in enumerate(jobs):
        try:
            job = loader.load_sweep_config(recipe, list(words))
            check_machine(checked(job, words))
        except (ConfigError, HydraException, OmegaConfBaseException) as error:
            known = isinstance(error, ConfigError)
            reason = error if known else explain_words(error, words)
            raise ConfigError(f"job #{number} ({' '.join(words)}): {reason}") from None


def _values_of(override: Override) -> list[Any]:
    """Return the values of a sweep, of an interval its ends."""
    if override.is_interval_sweep():
        interval: Any = override.value()
        return [interval.start, interval.end]
    values = islice(override.sweep_iterator(), _MOST_VALUES)
    return [one.text if isinstance(one, QuotedString) else one for one in values]

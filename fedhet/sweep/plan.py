"""What a sweep will be, before it runs: how many jobs, and what tells them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from fedhet.sweep.optuna_search import check_search, is_search
from fedhet.sweep.sweep_folder import SweepRefused


@dataclass(frozen=True)
class Survey:
    """A sweep before it runs.

    Attributes:
        total: how many jobs there are; None if the sweeper alone knows.
        together: how many of them the sweeper hands to the launcher at once, at most.
        varied: the keys that have more than one value.
    """

    total: int | None
    together: int | None
    varied: Sequence[str]


def survey(words: Sequence[str], objective: str, sweeper: Mapping[str, Any]) -> Survey:
    """Return what a sweep will be.

    Args:
        words: the overrides as they were typed.
        objective: the figure that a search optimises.
        sweeper: the node hydra.sweeper.

    Raises:
        SweepRefused: if something is asked for that a sweep cannot have.
    """
    _check_words(words)
    check_search(objective, sweeper)
    overrides = _parsed(words, sweeper)
    last = {one.get_key_element(): one for one in overrides}  # a typed word goes before the file's
    varied = [key for key, override in last.items() if override.is_sweep_override()]
    if is_search(sweeper):
        trials, together = sweeper.get("n_trials"), sweeper.get("n_jobs")
        return Survey(int(trials) if trials else None, int(together) if together else None, varied)
    total = sum(len(batch) for batch in BasicSweeper.split_arguments(overrides, None))
    return Survey(total, min(total, int(sweeper.get("max_batch_size") or total)), varied)


def _check_words(words: Sequence[str]) -> None:
    given = {word.partition("=")[0].lstrip("+") for word in words}
    if "results_dir" in given:
        raise SweepRefused(
            "results_dir is the folder of one run, and a sweep has many: set hydra.sweep.dir, "
            "the folder of all of them"
        )
    if "resume" in given:
        raise SweepRefused("resume is for one run; a sweep goes on with: fedhet -m --resume FOLDER")


def _parsed(words: Sequence[str], sweeper: Mapping[str, Any]) -> list[Override]:
    """Return the overrides, with those of an experiment file first, as the sweeper sees them."""
    hydra = GlobalHydra.instance()
    loader = hydra.config_loader() if hydra.is_initialized() else None
    params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    return OverridesParser.create(config_loader=loader).parse_overrides([*params, *words])

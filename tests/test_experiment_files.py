"""Every experiment of reproductions/ composes, says what it is, and its sweep makes its table."""

from functools import cache, lru_cache

import pytest
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict

from fedhet.common.nested import flat
from fedhet.conf import compose_overrides, config_yaml, method_name
from fedhet.conf.experiments import experiment_files, read_experiment
from fedhet.conf.mistakes import groups, options_of
from fedhet.report.published_tables import Paper, read_paper, selects

EXPERIMENTS = experiment_files()
METHODS = set(options_of("strategy"))
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("name", EXPERIMENTS)]


@cache
def content(name: str) -> dict:
    return read_experiment(EXPERIMENTS[name])


def jobs_of(name: str) -> list[list[str]]:
    """Return the overrides of the jobs that Hydra makes of the file's own sweep."""
    params = content(name)["hydra"]["sweeper"]["params"]
    parsed = OverridesParser.create().parse_overrides([f"{k}={v}" for k, v in params.items()])
    (batch,) = BasicSweeper.split_arguments(parsed, None)
    return [list(job) for job in batch]


def settings_of(name: str, job: tuple[str, ...]) -> tuple[str, dict]:
    """Return a job's method and settings; no table is laid out by a strategy's own defaults."""
    seed = next(word for word in job if word.startswith("seed="))
    method, settings = of_any_seed(name, tuple(word for word in job if word != seed))
    return method, {**settings, "seed": int(seed.removeprefix("seed="))}


@cache
def of_any_seed(name: str, job: tuple[str, ...]) -> tuple[str, dict]:
    strategy = next((word for word in job if word.startswith("strategy=")), None)
    others = tuple(word for word in job if word != strategy)
    if strategy is None:
        return composed(name, others)
    names = strategy.removeprefix("strategy=").strip("[]").split(",")
    slots = tuple(f"strategy/{part.replace('/', '=')}" for part in names if "/" in part)
    methods = [part for part in names if "/" not in part]
    assert set(methods) <= METHODS
    chosen = (f"strategy=[{','.join(methods)}]",) if slots else ()  # whose slot may be no other's
    return "+".join(sorted(methods)), composed(name, others + chosen + slots)[1]


@lru_cache(maxsize=64)  # composing is slow, so it is done anew for groups only
def composed(name: str, others: tuple[str, ...]) -> tuple[str, dict]:
    """Return the method and the settings, by dotted key and resolved, of these words."""
    chosen = [word for word in others if word.partition("=")[0] in groups()]
    recipe = compose_overrides((f"+experiment={name}", *chosen))
    settings = recipe.copy()
    with open_dict(settings):
        settings.task.classifier_tensors = 1
        settings.paper = None
    for word in OverridesParser.create().parse_overrides([w for w in others if w not in chosen]):
        missing = object()
        assert OmegaConf.select(settings, word.key_or_group, default=missing) is not missing
        OmegaConf.update(settings, word.key_or_group, word.value())
    return method_name(recipe), flat(OmegaConf.to_container(settings, resolve=True))


def check_sweep(name: str, paper: Paper) -> None:
    """Check that every row and column that is to be run has its runs, each seed once."""
    settings = [settings_of(name, tuple(job)) for job in jobs_of(name)]
    placed = set()
    for label, row in paper.rows.items():
        if row.not_run:
            continue
        for column, keys in paper.columns.items():
            chosen = [n for n, (m, s) in enumerate(settings) if selects({**row.runs, **keys}, m, s)]
            seeds = [settings[number][1]["seed"] for number in chosen]
            assert seeds, f"no run for {label}, {column}"
            assert len(set(seeds)) == len(seeds), f"{label}, {column} has a seed twice"
            placed |= set(chosen)
    assert placed == set(range(len(settings))), "runs that belong to no cell"


def check_node(name: str, paper: Paper) -> None:
    """Check the paper's numbers in config.yaml: they are told apart by nothing but their places."""
    node = content(name)
    assert not {"runtime", "device", "results_dir"} & set(node)  # it says what runs, not where
    written = yaml.safe_load(config_yaml(compose_overrides((f"+experiment={name}",)), 1))["paper"]
    assert written == node["paper"]
    for part in ("columns", "rows"):
        assert list(written[part]) == list(node["paper"][part])
    for label, row in paper.rows.items():  # a row that is not run has no recipe
        assert (row.runs or {}).get("strategy") not in METHODS if row.not_run else row.runs, label


def test_its_sweep_makes_every_cell_and_config_yaml_has_the_papers_node_in_order(name):
    """In one test, so that both read what composing, the slow part, has made."""
    paper = read_paper(content(name)["paper"])
    check_sweep(name, paper)
    check_node(name, paper)

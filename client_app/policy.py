"""A site's policy: the rules that its owner writes, and what of a run they forbid.

The file is YAML with the keys of :class:`Policy`. client_app/site_policy.py has the doors at which
a client obeys it; docs/policy.md says what that is worth.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, time
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from flwr.app import Message, MessageType
from omegaconf import DictConfig, OmegaConf
from pydantic import AfterValidator

from fedhet.common.configured import Configured, shown
from fedhet.common.decisions import CONFUSION
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, Delta, Positive, Says, Text
from fedhet.common.metrics import row_name
from fedhet.common.outside import is_name
from fedhet.conf import FOLDER, build_part, catalogue, compose_overrides, fingerprint, plain_part
from fedhet.conf.build import strategy_parts
from fedhet.conf.mistakes import option_of_target
from fedhet.strategies.base import ClientSide
from fedhet.strategies.modes.private.gaussian_mechanism import epsilon_of
from fedhet.strategies.wire.records import COLUMNS, config_of
from fedhet.tasks.conformal import CALIBRATE

PINNED = "FEDHET_PINNED"  # set by an executor that compares what runs with bundles and own_code
_PRIVACY = "strategy.differential_privacy"
_PATHS = ("path", "public", "vocabulary_file", "reuse_training")
_RESOLVER = re.compile(r"\$\{[\w.]+:")


# ---- the file ------------------------------------------------------------------------------------


def _span(text: str) -> str:
    if any(one.tzinfo for one in _times(text)):  # ValueError: they are none
        raise ValueError("the site's clock has no zone")
    return text


def _times(span: str) -> tuple[time, time]:
    begin, _, end = span.partition("-")
    return time.fromisoformat(begin), time.fromisoformat(end)


Hours = Annotated[str, AfterValidator(_span), Says("HH:MM-HH:MM")]
Names = list[Text]


class Privacy(Configured):
    """The differential privacy that a run must have."""

    section = "privacy"

    by: Literal["site", "server"] | None = None
    """who adds the noise: site (strategy/differential_privacy=local) | server (central_*, with
    clipping=client, is enough); null: nobody has to"""
    epsilon: Positive | None = None
    """the most that all rounds of a run may cost together; null: any"""
    delta: Delta = 1.0e-5
    """for which epsilon is computed"""

    def check_together(self) -> None:
        """Refuse an epsilon of no noise."""
        if self.epsilon is not None and self.by is None:
            raise ConfigError(f"privacy.epsilon={self.epsilon}: set privacy.by to site or server")


class Policy(Configured):
    """The rules; null is no rule."""

    site: Text | None = None
    """the site's name, for messages"""
    bundles: Names | None = None
    """SHA-256 of the app bundles that may run here, all 64 digits"""
    own_code: Text | None = None
    """folder with the site's own copy of fedhet, which runs in place of what a run brings"""
    code: Names | None = None
    """hashes of fedhet's code and the project's, as server and clients compare them"""
    functions: Names | None = None
    """functions and classes, beside fedhet's own, that a recipe may name (package.module:name)"""
    tasks: Names | None = None
    """tasks that may be learned"""
    folders: Names | None = None
    """folders that examples may be read from"""
    payloads: Names | None = None
    """what may leave beside update and metrics; patterns such as class_*"""
    metrics: Names | None = None
    """numbers that may leave; patterns such as received-*; the others stay here"""
    min_examples: Count = 1
    """a number that is measured on fewer examples stays here"""
    secure_aggregation: bool = False
    """true: the server may see sums over sites alone"""
    privacy: Privacy = Privacy()
    """the differential privacy that a run must have"""
    rounds: Count | None = None
    """the most rounds of a run"""
    hours: list[Hours] | None = None
    """when the site computes, by its clock, such as 20:00-06:00"""


def read_policy(path: Path) -> Policy:
    """Return the policy of a file.

    Raises:
        ConfigError: if it cannot be read or is wrong; it names the file, the key and what is
            allowed.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"policy={path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"policy={path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"policy={path} has no rules: write `key: value` (docs/policy.md)")
    try:
        return Policy(**values)
    except ConfigError as error:
        raise ConfigError(f"policy={path}: {error}") from None


@lru_cache(maxsize=64)  # asked for every message
def policy_of(path: Path, stamp: tuple[int, int, int]) -> Policy:
    """Return the policy of a file; read it again only if it has changed."""
    return read_policy(path)


def stamp_of(path: Path) -> tuple[int, int, int]:
    """Return what changes with a file; zeros without one, which reading it then says."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns


# ---- the rules -----------------------------------------------------------------------------------


def line(found: str, rules: Policy, *names: str) -> str:
    """Return what is forbidden, with its rules as the file has them."""
    texts = []
    for name in names:
        value: Any = rules
        for part in name.split("."):
            value = getattr(value, part)
        texts.append(f"{name}={shown(value)}")
    return f"{found} ({', '.join(texts)})"


def matches(name: str, patterns: Sequence[str] | None) -> bool:
    """Return whether a name may leave; None: any may."""
    return patterns is None or any(fnmatchcase(name, one) for one in patterns)


@lru_cache(maxsize=1024)  # for a simulation's clients; a run's words do not change
def forbidden_by_run(
    file: Path, stamp: tuple[int, int, int], words: tuple[str, ...], folder: str
) -> tuple[str, ...]:
    """Return what the policy forbids of a run, as its recipe tells."""
    rules, recipe = policy_of(file, stamp), compose_overrides(words)
    if code := tuple(_code(rules, recipe, words)):
        return code  # whose classes are not built
    sides = strategy_parts(recipe, classifier_tensors=1).client_sides.values()
    return (
        *_data(rules, recipe, folder),
        *_privacy(rules, recipe, [side for side in sides if side.private]),
        *forbidden_payloads(rules, {name for side in sides for name in side.sends}),
    )


def _code(rules: Policy, recipe: DictConfig, words: Sequence[str]) -> Iterator[str]:
    simulated, compared = bool(recipe.runtime.simulation), PINNED in os.environ
    for rule in ("bundles", "own_code"):
        if getattr(rules, rule) is not None and simulated and compared:
            yield line("runtime.simulation=true", rules, rule)
        elif getattr(rules, rule) is not None and not simulated and not compared:
            yield line("an executor that compares no bundles (docs/policy.md)", rules, rule)
    if rules.code is not None and (code := fingerprint(recipe)["code"]) not in rules.code:
        yield line(f"code={code}", rules, "code")
    if rules.functions is not None:
        plain: Any = OmegaConf.to_container(recipe)
        named = {name for key, value in plain.items() if key != "logger" for name in _named(value)}
        named |= {word for word in words if _RESOLVER.search(word)}
        for name in sorted(named - _named_by_fedhet() - {*rules.functions}):
            yield line(name, rules, "functions")


def _named(node: Any) -> Iterator[str]:
    """Yield the functions and classes that a part of a recipe names."""
    if isinstance(node, Mapping):
        if isinstance(target := node.get("_target_"), str):
            yield target
        for value in node.values():
            yield from _named(value)
    elif isinstance(node, list):
        for value in node:
            yield from _named(value)
    elif isinstance(node, str) and is_name(node):
        yield node


@cache
def _named_by_fedhet() -> frozenset[str]:
    """Return the functions and classes that fedhet's own methods, options and tasks name."""
    own = [catalogue.methods(), catalogue.options()]
    own += [yaml.safe_load(path.read_text("utf-8")) for path in (FOLDER / "task").glob("*.yaml")]
    return frozenset(name for one in own for name in _named(one))


def _data(rules: Policy, recipe: DictConfig, folder: str) -> Iterator[str]:
    if rules.tasks is not None and recipe.task.name not in rules.tasks:
        yield line(f"task={recipe.task.name}", rules, "tasks")
    if rules.rounds is not None and recipe.rounds > rules.rounds:
        yield line(f"rounds={recipe.rounds}", rules, "rounds")
    if rules.folders is None:
        return
    if folder and not _inside(folder, rules.folders):
        yield line(f"data-folder={folder}", rules, "folders")
    places = {"task": plain_part(recipe, "task")}
    places["local"] = {"reuse_training": recipe.local.reuse_training}
    for key, value in _texts(places, ""):
        if _is_place(key, value) and not _inside(value, rules.folders):
            yield line(f"{key}={value}", rules, "folders")


def _texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield all texts of a part of a recipe, each with its key."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value, key)
    elif isinstance(node, str):
        yield key, node


def _is_place(key: str, value: str) -> bool:
    """Return whether a text names a file, a folder or an address that could be read."""
    if not ("/" in value or key.rpartition(".")[2] in _PATHS):
        return False
    path = Path(value).expanduser()
    return "://" in value or path.is_absolute() or path.exists()


def _inside(path: str, folders: Sequence[str]) -> bool:
    if "://" in path:
        return False
    place = Path(path).expanduser().resolve()
    return any(place.is_relative_to(Path(one).expanduser().resolve()) for one in folders)


def _privacy(rules: Policy, recipe: DictConfig, noised: Sequence[ClientSide]) -> Iterator[str]:
    """Yield what the rules of privacy forbid; ``noised`` have payloads with noise of their own."""
    if rules.secure_aggregation and recipe.strategy.secure_aggregation is None:
        yield line("strategy/secure_aggregation=none", rules, "secure_aggregation")
    if rules.privacy.by is None:
        return
    group = _PRIVACY.replace(".", "/")
    if (node := recipe.strategy.differential_privacy) is None:
        yield line(f"{group}=none", rules, "privacy.by")
        return
    option = option_of_target(group, str(node["_target_"]))
    if option != "local" and (rules.privacy.by == "site" or not option.startswith("central_")):
        yield line(f"{group}={option}", rules, "privacy.by")
        return
    if node.get("clipping", "client") != "client":
        yield line(f"{_PRIVACY}.clipping={node.clipping}", rules, "privacy.by")
    if node.reproducible_noise:
        yield line(f"{_PRIVACY}.reproducible_noise=true", rules, "privacy.by")
    for name in sorted(name for side in noised if side.reproducible_noise for name in side.private):
        yield line(f"reproducible_noise=true for the payload {name}", rules, "privacy.by")
    if rules.privacy.epsilon is not None:
        epsilon = _epsilon(recipe, noised, rules.privacy.delta)
        if epsilon > rules.privacy.epsilon:
            yield line(f"epsilon={epsilon:.3g} of all rounds", rules, "privacy.epsilon")


def _epsilon(recipe: DictConfig, noised: Sequence[ClientSide], delta: float) -> float:
    """Return epsilon of one example at a site that is asked in every round; inf where it has none.

    Gaussian mechanisms beside each other are one, of 1 / z^2 = sum 1 / z_i^2 (Dong et al. 2022,
    Corollary 3.3). That of the update protects all of a site's examples together, so each, too.
    """
    if recipe.strategy.asynchronous is not None:  # nobody knows how often it is asked
        return float("inf")
    privacy = build_part(recipe, _PRIVACY, classifier_tensors=1)
    each = [privacy.noise_multiplier, *(side.noise_multiplier for side in noised)]
    if not all(each):
        return float("inf")
    z = 1 / math.hypot(*(1 / float(one) for one in each))
    return epsilon_of(z, int(recipe.rounds), delta, _PRIVACY)


def forbidden_payloads(rules: Policy, names: Iterable[str]) -> Iterator[str]:
    """Yield the payloads that must not leave."""
    for name in sorted(names):
        if not matches(name, rules.payloads):
            yield line(f"the payload {name}", rules, "payloads")


def forbidden_by_message(rules: Policy, message: Message, recipe: DictConfig) -> Iterator[str]:
    """Yield what the policy forbids of one message.

    A site tells the hour that it has come to the registration, too: it then takes part later.
    """
    kind = message.metadata.message_type
    for record in (COLUMNS, CALIBRATE, CONFUSION):
        if kind == f"{MessageType.QUERY}.{record}":
            yield from forbidden_payloads(rules, [record])
    measured = ("loss", "accuracy", *map(row_name, recipe.evaluation.metrics))
    if kind == MessageType.EVALUATE and not any(matches(one, rules.metrics) for one in measured):
        yield line("an evaluation", rules, "metrics")
    round = int(config_of(message).get("round", 0))
    if rules.rounds is not None and round > rules.rounds:
        yield line(f"round {round}", rules, "rounds")
    if kind != MessageType.QUERY and rules.hours is not None and not _is_open(rules.hours):
        now = datetime.now()
        yield line(f"work at {now:%H:%M}", rules, "hours")


def _is_open(hours: Sequence[str]) -> bool:
    now = datetime.now().time()
    for span in hours:
        begin, end = _times(span)
        over_midnight = begin >= end
        if (begin <= now or now < end) if over_midnight else begin <= now < end:
            return True
    return False

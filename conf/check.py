"""Checks a composed recipe before anything is started: against the schema, and against itself.

Every command composes through ``conf.compose``, and Hydra's own composition passes through
``checked``, so this is the one place where fixed keys are checked. What needs the code of a class
(torch), the data or the model is checked after it: by the classes (``fedhet.common.configured``)
and by ``fedhet.server_app.assembly``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from fedhet.common.configured import shown
from fedhet.common.errors import ConfigError, did_you_mean
from fedhet.common.kinds import MOST, in_words
from fedhet.common.nested import leaves
from fedhet.conf.mistakes import (
    begins_anew,
    check_option,
    groups,
    options_in_file,
    options_of,
    unknown_key,
    value_at,
)
from fedhet.conf.relations import check_relations
from fedhet.conf.schema import Recipe
from fedhet.conf.schema.lookup import FoundKey, fields_of, keys_below, locate, variants_of

_UNRESOLVED = ("optimizers", "paper", "choice")  # of classes, or read by one command alone
_OF_STRATEGY = ("personal", "phases", "allow_stacked_corrections")  # the rest is built
_REFERENCE = re.compile(r"\$\{(?:[\w.]+:)?([A-Za-z_]\w*(?:\.\w+)*)")
_OPTION = re.compile(r"(?:\+\+)?task\.(data_options|model_options)\.(\w+)[.=]")
_MOVED = ("path", "target")  # out of the options of a data function
_OPEN = ("strategy.methods", "paper", "choice", "local.optimizers", "logger")


def checked(recipe: DictConfig, words: Sequence[str] = ()) -> DictConfig:
    """Return a recipe after checking it; ``words`` are the overrides that were typed.

    Raises:
        ConfigError: in one line, that names the value, what is allowed, and the key.
    """
    plain = _plain(recipe)
    values = _resolved(plain, recipe, ())
    if wrong := _wrong_values(values):
        raise ConfigError("; ".join(wrong.values()))
    _check_unread(plain, words)
    _check_options(values["task"]["name"], words)
    check_relations(values, recipe)
    return recipe


def check_sweep(recipe: DictConfig, swept: Mapping[str, Sequence[Any]]) -> None:
    """Check the values of a sweep before its first job; each job checks how its values fit.

    Args:
        recipe: without the swept values.
        swept: the values of each key that has several; a group's name stands for all its keys.
    """
    values = _resolved(_plain(recipe), recipe, ())
    for key, line in _wrong_values(values).items():
        if not any(_covers(one.replace("/", "."), key) for one in swept):
            raise ConfigError(line)
    for key, options in swept.items():
        if key in groups():
            for option in options:
                check_option(key, option)
            continue
        *parents, name = key.split(".")
        node = value_at(values, parents)
        if not isinstance(node, dict) or name not in node:
            continue  # a key that only swept options have
        for option in options:
            wrong = _wrong_values(_replaced(values, [*parents, name], option))
            if line := next((line for one, line in wrong.items() if _covers(one, key)), ""):
                raise ConfigError(line)


def _plain(recipe: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(recipe)
    plain.pop("hydra", None)
    return dict(plain)


def _wrong_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Return what the schema says is wrong: a line by key."""
    try:
        Recipe.model_validate(values)
    except ValidationError as error:
        return _without_defaults(error, values) or _lines(error, values)
    return {}


def _replaced(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**values, first: _replaced(values[first], rest, value) if rest else value}


def _resolved(plain: Any, node: Any, path: tuple[str, ...]) -> Any:
    """Return plain values with the references followed that the schema has types for."""
    if path[-1:] and path[-1] in _UNRESOLVED:
        return plain
    if len(path) == 1 and path[0] not in fields_of(Recipe):
        return plain
    if path[:1] == ("strategy",) and len(path) > 1 and path[1] not in _OF_STRATEGY:
        return plain
    if isinstance(plain, dict):
        return {key: _resolved(plain[key], _Child(node, key), (*path, str(key))) for key in plain}
    if isinstance(plain, list):
        return [_resolved(one, _Child(node, n), (*path, str(n))) for n, one in enumerate(plain)]
    if not (isinstance(plain, str) and "${" in plain):
        return plain
    try:
        found = node.value() if isinstance(node, _Child) else node
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{'.'.join(path)}={plain} cannot be read: {reason}") from None
    return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found


class _Child:
    """A node's child that is looked up only where a reference has to be followed."""

    def __init__(self, parent: Any, key: Any) -> None:
        self._parent, self._key = parent, key

    def value(self) -> Any:
        parent = self._parent.value() if isinstance(self._parent, _Child) else self._parent
        return parent[self._key]


# --------------------------------------------------------------------------------- the schema's
def _lines(error: ValidationError, values: Mapping[str, Any]) -> dict[str, str]:
    """Return one line for each key that a validation error is about."""
    lines: dict[str, str] = {}
    for one in error.errors(include_url=False, include_context=False):
        key = locate(one["loc"])
        if one["type"].startswith("union_tag"):
            key = _tag_key(key)
        name = key.path[0] if one["type"] == "missing" else key.name  # one is enough
        lines.setdefault(name, _line(one["type"], key, values))
    return lines


def _without_defaults(error: ValidationError, values: Mapping[str, Any]) -> dict[str, str]:
    """Return what a project's task file needs that has no ``defaults``, and lacks keys."""
    missing = (one for one in error.errors(include_url=False) if one["type"] == "missing")
    lacks_keys = any(locate(one["loc"]).path[0] == "task" for one in missing)
    task = values.get("task")
    if not lacks_keys or not isinstance(task, dict) or not begins_anew(str(task.get("name"))):
        return {}
    base = "own" if "data" in task else "image_folder"
    line = f"task={task['name']}: its file needs the line `defaults: [{base}]`, the task from "
    return {"task": f"{line}which it takes the keys that it does not set"}


def _tag_key(key: FoundKey) -> FoundKey:
    """Return the key that tells the variants of a group apart."""
    assert key.field is not None
    name = "inputs" if key.path == ("task",) else "name"
    model = next(iter(variants_of(key.field).values()), None)
    field = fields_of(model).get(name) if model else None
    return FoundKey((*key.path, name), field, model) if field else key


def _line(kind: str, key: FoundKey, values: Mapping[str, Any]) -> str:
    value = value_at(values, key.path)
    if value == "???":  # Hydra's mark of a value that a user has to give
        return f"{key.name} is not set: it must be {key.allowed}"
    group = "/".join(key.path)
    if isinstance(value, str) and "/" in group and group in groups():
        known = options_of(group)
        right = f"write {group}={value}" if value in known else f"{group} has: {', '.join(known)}"
        return f"{key.name}={value} is not allowed: {right}"
    if key.field is None and (kind not in _NO_MAPPING or key.path[0] == "logger"):
        return unknown_key(key.name, value, values)
    if kind == "missing":
        group = key.path[0]
        chosen = value_at(values, (group, "name"))
        if len(key.path) == 2 and variants_of(fields_of(Recipe)[group]) and chosen is not None:
            return f"{group}.name={shown(chosen)} lacks {key.name}: choose {group}={shown(chosen)}"
        return f"{key.name} is missing: it must be {key.allowed}"
    choices = _choices(key)
    if choices:
        near = _as_reference(key, value, choices[-1]) or did_you_mean(str(value), choices)
        return f"{key.name}={shown(value)} is unknown{near}; allowed: {', '.join(choices)}"
    allowed = key.allowed or in_words(dict)
    if isinstance(value, int) and value > MOST and "at least" in allowed:
        allowed = f"{allowed}, and at most {MOST}"
    hint = _hint(key, value, allowed)
    return f"{key.name}={shown(value)} is not allowed: it must be {allowed}{hint}"


def _hint(key: FoundKey, value: Any, allowed: str) -> str:
    """Return how a value of the wrong type is probably meant."""
    if _is_switch(value, allowed):
        return f" (write {key.name}={_SWITCHES[value.lower()]})"
    if isinstance(value, str) and "number" in allowed and _NUMBER.fullmatch(value):
        return f", and this is a text (write {key.name}={value}, as the shell does of $NAME)"
    if key.name == "local.epochs" and isinstance(value, float):
        return "; for a part of an epoch write local.epochs=null local.steps=K, optimizer steps"
    if key.name == "resume" and isinstance(value, str):
        return f" (write resume=true results_dir={value})"
    if allowed.startswith("a list") and isinstance(value, str | int | float):
        return f" (write {key.name}=[{value}])"
    if allowed.startswith("a mapping") and not isinstance(value, Mapping):
        names = [one.name for one in keys_below(Recipe) if one.path[:-1] == key.path]
        return f"; set {', '.join(names)}" if names else ""
    return _as_reference(key, value, allowed)


def _as_reference(key: FoundKey, value: Any, allowed: str) -> str:
    """Return how a class or a function is named that was named by a file, or with dots alone."""
    if not (isinstance(value, str) and allowed.endswith("package.module:function")):
        return ""
    module, _, name = value.rpartition(".")
    if name == "py":
        return f" (write {key.name}={module.replace('/', '.')}:NAME, NAME in that file)"
    return f" (write {key.name}={module}:{name})" if module and ":" not in value else ""


_NO_MAPPING = ("dict_type", "model_type", "model_attributes_type")
_NUMBER = re.compile(r"[-+]?\d*\.?\d+(e[-+]?\d+)?")
_SWITCHES = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def _is_switch(value: Any, allowed: str) -> bool:
    """Whether Hydra has read a yes or no as text."""
    return isinstance(value, str) and value.lower() in _SWITCHES and "true or false" in allowed


def _choices(key: FoundKey) -> list[str]:
    group = fields_of(Recipe).get(key.path[0])
    if len(key.path) == 2 and key.path[1] in ("name", "inputs") and group is not None:
        return sorted(variants_of(group))
    return key.choices


# -------------------------------------------------------------------------------- keys of nobody
def _check_unread(plain: Mapping[str, Any], words: Sequence[str]) -> None:
    """Refuse keys that nothing reads: typed ones of the strategy, and others beside the schema's.

    An experiment file may have keys of its own, to which its other values refer.
    """
    typed = [word.partition("=")[0].lstrip("+") for word in words if word.startswith("+")]
    added = [key for key in typed if key.startswith("strategy.") and not key.startswith(_OPEN)]
    others = [key for key in plain if key not in fields_of(Recipe)]
    if not added and not others:
        return
    read = {name for _, text in leaves(plain) for name in _REFERENCE.findall(str(text))}
    for key in [*others, *added]:
        if not any(_covers(key, name) for name in read) and not _is_built(plain, key):
            raise ConfigError(unknown_key(key, value_at(plain, key.split(".")), plain))


def _check_options(task: str, words: Sequence[str]) -> None:
    """Refuse an option of a task whose file has a list of them, and this one not.

    Keys below the options of a task without a list are the user's, whose function checks them.
    """
    for word in words:
        found = _OPTION.match(word)
        if found is None:
            continue
        group, name = found.groups()
        if group == "data_options" and name in _MOVED:
            raise ConfigError(f"task.data_options.{name}: the key is task.{name} now")
        known = options_in_file(task, group)
        if known and name not in known:
            raise ConfigError(
                f"unknown key task.{group}.{name}{did_you_mean(name, known)}; task={task} has: "
                f"{', '.join(known)}"
            )


def _covers(key: str, name: str) -> bool:
    return key == name or name.startswith(f"{key}.") or key.startswith(f"{name}.")


def _is_built(plain: Mapping[str, Any], key: str) -> bool:
    """Return whether a key is an argument of a class, whose constructor checks it."""
    parts = key.split(".")
    nodes = [value_at(plain, parts[:n]) for n in range(2, len(parts) + 1)]
    return any(isinstance(node, Mapping) and "_target_" in node for node in nodes)

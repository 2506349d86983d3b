"""Says in one line what is wrong with an override, and which keys or options are nearest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf

from fedhet.common.errors import ConfigError, did_you_mean, is_list
from fedhet.common.nested import leaves
from fedhet.conf.catalogue import LOCAL_OPTIMIZERS, METHODS, is_own, method_of, methods, options
from fedhet.conf.composition import can_be_read, quoted, typed, with_open_keys
from fedhet.conf.other_words import key_here, option_here
from fedhet.conf.project import conf_folders, where_looked
from fedhet.conf.schema import Recipe
from fedhet.conf.schema.lookup import fields_of, keys_below, tags_of, variants_of

SEVERAL = "Ambiguous value for argument"  # Hydra's, too
NO_OPTION = "Config group override must be"  # Hydra's ValueError
_SHOWN = 4  # options that an error lists
_WITH_CLASSES = ("strategy", "schedule", "system", "attack")  # nodes with keys of their classes
_PACKAGE = re.compile(r"# @package (\S+)")  # Hydra's, in the first line of a file
_LINES = 200  # characters of a message that is not ours
_NO_KEY = re.compile(r"Could not (?:override|delete from config\.) '([^']+)'")
_TAKEN = re.compile(r"An item is already at '([^']+)'")
_MERGING = re.compile(r"Error merging override (\S+)")


def unknown_key(key: str, value: Any, values: Mapping[str, Any]) -> str:
    """Return what is wrong with a key that a recipe does not have.

    Args:
        key: with dots.
        value: that was given, to show how the nearest key is written.
        values: the recipe, plain.
    """
    known = [one for one in known_keys(values) if one != key]
    group, _, name = key.rpartition(".")
    top = key.partition(".")[0]
    there = [one for one, _ in leaves({top: values.get(top) or {}}) if one != key]
    below = [one for one in there if one.endswith(f".{name}")]
    if group == "task" and key in known_keys(values):
        return f"unknown key {key}: this task's file leaves it out; write +{key}={value}"
    if owners := _owners(key):
        owner = owners[0].partition("=")[0]
        named = " or ".join(option.partition("=")[2] for option in owners[:_SHOWN])
        more = " or another" if len(owners) > _SHOWN else ""
        kind = "task.inputs" if owner == "task" else owner
        line = f"unknown key {key}: it belongs to {kind}={named}{more}{_chosen(owner, values)}"
        return f"{line}, which has {below[0]}" if below else line
    nested = [one for one in groups() if one.endswith(f"/{key}")]
    if nested and str(value) in options_of(nested[0]):
        return f"unknown key {key}: write {nested[0]}={value}"
    siblings = [one.removeprefix(f"{group}.") for one in known if one.rpartition(".")[0] == group]
    siblings += [] if group else [one for one in groups() if "/" not in one]
    near = [f"{group}.{one}" if group else one for one in get_close_matches(name, siblings, 3, 0.6)]
    near = below or near
    near += [one for one in known if one.rpartition(".")[2] == name]
    line = f"unknown key {key}"
    if not below and (written := key_here(key, value)):
        return f"{line}: write {written}"
    near = near or get_close_matches(key, known, 3, 0.6)
    if near:
        line += f": did you mean {' or '.join(list(dict.fromkeys(near))[:3])}?"
    if group and siblings:
        line += f"; {group} has: {', '.join(siblings)}"
    if group == "task":
        line += (
            "; your model's function takes task.model_options.*, your data's task.data_options.*"
        )
    return line if near or (group and siblings) else f"{line}; `fedhet --help` lists all keys"


def known_keys(values: Mapping[str, Any]) -> list[str]:
    """Return the keys with a value that a recipe has, and those of the schema that it could."""
    fixed = [key.name for key in keys_below(Recipe, (), tags_of(values))]
    nodes = {name: values.get(name) for name in _WITH_CLASSES}
    own = [key for key, _ in leaves(nodes) if "._target_" not in key]
    return list(dict.fromkeys([*fixed, *own]))


def explain(
    error: Exception, words: Sequence[str], compose: Callable[[Sequence[str]], Any]
) -> ConfigError:
    """Return an error of Hydra's as one line of ours.

    Args:
        error: what composing has raised.
        words: the overrides.
        compose: composes other overrides, for the keys that there are.
    """
    text = str(error) or str(error.__cause__)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return ConfigError(_unknown_option(error.missing_cfg_file, error.options or ()))
    if isinstance(error, OverrideParseException):
        return ConfigError(_unreadable(error))
    if isinstance(error, yaml.YAMLError):
        return ConfigError(_damaged_yaml(error))
    if found := _NO_KEY.search(text):
        return ConfigError(_no_key(found[1], words, compose))
    if found := _TAKEN.search(text):
        return ConfigError(f"{found[1]} is in the recipe already: write {found[1]}=... without +")
    if found := _MERGING.search(text):
        word = typed(found[1])
        key = word.partition("=")[0]
        return ConfigError(f"{word}: {key} cannot be set: {one_line(str(error.__cause__))}")
    if text.startswith(SEVERAL):
        overrides = [one for one in with_open_keys(words) if "," in one and f"'{one}'" in text]
        word = typed(overrides[0]) if overrides else "KEY=A,B"
        key, _, value = word.partition("=")
        line = f"{word} has several values: fedhet -m runs each, {key}=[{value}] is a list"
        text = "" if key in groups() else f", {_in_shell(f'{key}={quoted(value)}')} one text"
        return ConfigError(f"{line}{text}")
    if text.startswith(NO_OPTION):
        chosen = [word for word in words if word.lstrip("+").partition("=")[0] in ("", *groups())]
        allowed = [options_of(word.lstrip("+").partition("=")[0]) for word in chosen]
        line = f"{' '.join(chosen)}: a group takes the name of an option, or [a,b]"
        return ConfigError(f"{line}: {', '.join(allowed[0])}" if len(chosen) == 1 else line)
    return ConfigError(one_line(text))


def _unreadable(error: OverrideParseException) -> str:
    """Return what is wrong with a word that Hydra's grammar lacks, and how its text is quoted."""
    word = typed(error.override)
    key, _, value = word.partition("=")
    opened, closed = value[:1] == "[", value[-1:] == "]"
    items = [item.strip() for item in (value[1:-1] if opened and closed else value).split(",")]
    several = ",".join(item if can_be_read(f"a={item}") else quoted(item) for item in items)
    cure = f"{key}=[{several}]" if opened and closed else f"{key}={quoted(value)}"
    if value and not (opened ^ closed) and value[0] not in "{'\"" and can_be_read(cure):
        line = f"{word} cannot be read: quote the text for Hydra and the shell: {_in_shell(cure)}"
        each = f"; several texts for -m: {_in_shell(f'{key}={several}')}"
        return line + (each if not opened and len(items) > 1 else "")
    reason = one_line(error.message)
    if "=" not in word or reason.startswith("LexerNoViableAltException"):
        reason = (
            "write KEY=VALUE without spaces, with texts in quotes; `fedhet --help` has the keys"
        )
    return f"{word} cannot be read: {reason}"


def _in_shell(word: str) -> str:
    """Return a word, with its quotes, as a shell takes it."""
    return shlex.quote(word) if set(word) & set('"$`\\') else f'"{word}"'


def _damaged_yaml(error: yaml.YAMLError) -> str:
    """Return where a file of the recipe is no YAML, and why."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return one_line(str(error))
    place = f"line {mark.line + 1}, column {mark.column + 1}"
    return f"{mark.name} cannot be read as YAML: {place}: {getattr(error, 'problem', '')}"


def _no_key(key: str, words: Sequence[str], compose: Callable[[Sequence[str]], Any]) -> str:
    if "/" in key.rstrip("/"):
        return f"unknown group {key}{did_you_mean(key, groups())}; groups: {', '.join(groups())}"
    value = next((w.partition("=")[2] for w in words if w.lstrip("+~").startswith(f"{key}=")), "")
    choices = [word for word in words if word.lstrip("+").partition("=")[0] in groups()]
    try:
        recipe = compose(choices)
    except Exception:  # they are wrong, too
        recipe = compose(())
    plain: Any = OmegaConf.to_container(recipe)
    return unknown_key(key, value, plain)


def _unknown_option(file: str, options: Sequence[str]) -> str:
    group, _, option = file.removesuffix(".yaml").rpartition("/")
    allowed = sorted({*options, *options_of(group)})
    line, near = f"{file} is not a file of the recipe", ""
    if group and allowed:
        if written := _option_here(group, option, allowed):
            return f"{group}={option} is unknown: write {written}"
        near = did_you_mean(option, allowed)
        line = f"{group}={option} is unknown{near}; allowed: {', '.join(allowed)}"
    looked = where_looked(only_above=bool(near))
    return f"{line}; {looked}" if looked else line


def _option_here(group: str, option: str, allowed: Sequence[str]) -> str:
    """Return how an option is written that a group has by another name, or another group has."""
    if option.lower() in allowed:
        return f"{group}={option.lower()}"
    if known := option_here(group, option):
        return known
    parts = option.split("+")
    if len(parts) > 1 and all(part in allowed for part in parts):
        return f"{group}=[{','.join(parts)}]"
    module, _, name = option.rpartition(".")
    if group == METHODS and name.isidentifier() and name[0].isupper():
        return f"{METHODS}={module}:{name}"
    if group == "task" and option.endswith((".csv", ".parquet")):
        return f"task=tabular task.path={option}"
    others = [one for one in groups() if one.startswith("strategy/") and option in options_of(one)]
    return f"{others[0]}={option}" if others else ""


def check_option(group: str, option: Any) -> None:
    """Refuse an option, or a list of several, that a group does not have."""
    for name in option if is_list(option) else [option]:
        if group == METHODS and is_own(str(name)):
            method_of(str(name))  # which refuses a class that is no method
            continue
        folder, _, own = f"{group}/{name}".rpartition("/")
        if own not in options_of(folder):
            raise ConfigError(_unknown_option(f"{folder}/{own}", ()))


def options_of(group: str, folders: Sequence[Path] | None = None) -> list[str]:
    """Return the options of a config group, by default the project's included."""
    where = [folder / group for folder in folders or conf_folders()]
    files = {path.stem for folder in where for path in folder.glob("*.yaml")}
    return sorted({*files, *(methods() if group == METHODS else options().get(group, ()))})


def method_lines() -> dict[str, str]:
    """Return what each method is, by its name; the project's recipes included."""
    own = [path for folder in conf_folders()[1:] for path in (folder / METHODS).glob("*.yaml")]
    found = {name: one["summary"] for name, one in methods().items()}
    return dict(sorted({**found, **{path.stem: first_comment(path) for path in own}}.items()))


def first_comment(path: Path) -> str:
    """Return a recipe file's first comment in one line; its package is none."""
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            words.append(line.lstrip("# "))
    return " ".join(words)


def begins_anew(task: str) -> bool:
    """Return whether a task's file is the project's, and takes no other task's keys."""
    paths = [folder / "task" / f"{task}.yaml" for folder in conf_folders()[1:]]
    return any(path.is_file() and "defaults" not in _loaded(path) for path in paths)


def options_in_file(task: str, group: str) -> list[str]:
    """Return the keys of a group of options, such as data_options, that a task's file has."""
    return _options_in_file(task, group, conf_folders())


@cache
def _options_in_file(task: str, group: str, folders: Sequence[Path]) -> list[str]:
    for path in (folder / "task" / f"{task}.yaml" for folder in folders):
        if path.is_file():
            return list(_loaded(path).get(group) or ())
    return []


def groups() -> list[str]:
    """Return the config groups, the nested ones included."""
    return _groups(conf_folders())


@cache
def _groups(folders: Sequence[Path]) -> list[str]:
    found = {
        path.parent.relative_to(folder).as_posix()
        for folder in folders
        for path in folder.glob("**/*.yaml")
    }
    found |= {METHODS, *options()} - {LOCAL_OPTIMIZERS}
    return sorted(name for name in found if name != "." and not name.startswith("base"))


@cache
def keys_of_methods() -> Mapping[str, Sequence[str]]:
    """Return the methods' own keys below ``strategy``, each with the methods that have it."""
    found: dict[str, list[str]] = {}
    for name, one in sorted(methods().items()):
        for key in one["keys"]:
            found.setdefault(key, []).append(name)
    return found


def options_with(key: str) -> Sequence[str]:
    """Return the options of a key's group that have the key; empty if all have it, or none."""
    group, _, name = key.partition(".")
    if group == "strategy":
        return keys_of_methods().get(key, ())
    field = fields_of(Recipe).get(group)
    variants = variants_of(field) if field else {}
    having = [tag for tag, model in variants.items() if name in fields_of(model)]
    return having if len(having) < len(variants) else ()


def option_of_target(group: str, target: str) -> str:
    """Return the option of a group that builds a class; the class where none does."""
    return next((one for one in options_of(group) if _target_of(group, one) == target), target)


def _target_of(group: str, option: str) -> Any:
    return _content_of(group, option).get("_target_")


def _owners(key: str) -> list[str]:
    """Return the options that have a key, each with its group."""
    group, rest = _group_of(key)
    having = [one for one in (options_of(group) if group else ()) if _has(group, one, rest)]
    found = [f"{group}={one}" for one in having]
    first = key.partition(".")[0]
    if first == METHODS and not found:
        found = [f"{METHODS}={one}" for one in _own_recipes() if _has(METHODS, one, rest)]
    return found or [f"{first}={option}" for option in options_with(key)]


def _has(group: str, option: str, name: str) -> bool:
    """Return whether an option has a key, by its name below the group or below the recipe."""
    names = [one for one, _ in leaves(_content_of(group, option))]
    return name in names or name in [f"{group}.{one}" for one in names]


def _own_recipes() -> list[str]:
    """Return the methods that the project has recipes for."""
    return [path.stem for one in conf_folders()[1:] for path in (one / METHODS).glob("*.yaml")]


def _group_of(key: str) -> tuple[str, str]:
    """Return the innermost config group that a key is below, but for strategy, and the rest."""
    parts = key.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        group = "/".join(parts[:depth])
        if group in groups() and group not in ("strategy", "task"):
            return group, ".".join(parts[depth:])
    return "", key


def _content_of(group: str, option: str) -> dict[str, Any]:
    """Return what an option has below its group."""
    if option in options().get(group, ()):
        return options()[group][option]["node"]
    path = next(
        one for folder in conf_folders() if (one := folder / group / f"{option}.yaml").is_file()
    )
    text, content = path.read_text(encoding="utf-8"), _loaded(path)
    package = _PACKAGE.match(text)
    if package is None:
        return dict(content)
    outer = "" if package[1] == "_global_" else package[1]
    inner = group.removeprefix(outer).strip("/").split("/")
    return dict(value_at(content, inner) or {})


def _loaded(path: Path) -> dict[str, Any]:
    """Return what a file of the recipe has.

    Raises:
        ConfigError: if it is no YAML.
    """
    try:
        with path.open(encoding="utf-8") as file:
            content = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ConfigError(_damaged_yaml(error)) from None
    return content if isinstance(content, dict) else {}


def _chosen(group: str, values: Mapping[str, Any]) -> str:
    """Return ", and this is GROUP=OPTION"; empty where several options build the same class."""
    start = f", and this is {group}="
    if group == "strategy":
        methods = values.get("strategy", {}).get("methods", {})
        return f"{start}{'+'.join(sorted(methods)) or 'fedavg'}"
    node = value_at(values, group.split("/"))
    if not isinstance(node, Mapping):
        return f"{start}{'method' if 'method' in options_of(group) else 'none'}"
    if group == "task":
        return f"{start}{node.get('name')}"
    if "_target_" not in node:
        return f"{start}{tags_of(values).get(group)}"
    same = [one for one in options_of(group) if _target_of(group, one) == node["_target_"]]
    return f"{start}{same[0]}" if len(same) == 1 else ""


def value_at(values: Any, path: Iterable[str]) -> Any:
    """Return the value at a path of keys; None where there is none."""
    for part in path:
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def one_line(text: str) -> str:
    """Return the start of a message of another library in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("See http", "full_key", "object_type"))]
    return shorten(" ".join(kept), _LINES, placeholder=" ...")

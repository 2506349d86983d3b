"""What is made of the schema: docs/keys.md, docs/recipe.schema.json and the comments in conf/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from docs.generator.markdown import escape, first_sentence, table
from fedhet.common.configured import shown
from fedhet.common.kinds import short_words
from fedhet.common.nested import leaves
from fedhet.conf import FOLDER, compose_overrides
from fedhet.conf.catalogue import CatalogueEntry, options
from fedhet.conf.mistakes import value_at
from fedhet.conf.schema import Recipe
from fedhet.conf.schema.lookup import FoundKey, fields_of, keys_below, variants_of

SCHEMA = FOLDER.parent / "docs" / "recipe.schema.json"
_GROUPS = {  # what a group's variants are called, and the file that has their defaults
    "partition": {},
    "runtime": {},
    "task": {"images": "mnist", "text": "imdb"},
}
_COMMENTED = ("config.yaml", "local/default.yaml", "runtime/*.yaml", "partition/*.yaml")
_LINE = re.compile(r"(?P<indent> *)(?P<key>\w+):(?P<value>[^#]*?)(?P<gap>\s+)#\s.*")
_REFERENCE = {"type": "string", "pattern": r"\$\{"}
_FRAME = """<!-- Made from conf/schema. -->
# Keys of the recipe

Every fixed key, with its default, the values that it may have, and its meaning. `fedhet --help`
shows the same table of one recipe. A wrong value, or a key that is not here, is refused before a
process starts or a folder is made. The keys of one method (`strategy.<method>.*`) are on its page:
[methods](methods.md). They are typed by the classes that take them.

An editor completes and checks recipes by [recipe.schema.json](recipe.schema.json): with the YAML
language server, begin a file of `reproductions/<paper>/conf/experiment/<paper>` with

```yaml
# yaml-language-server: $schema=../../../../../docs/recipe.schema.json
```
"""


# ----------------------------------------------------------------------------------------- page
def keys_page() -> str:
    """Return docs/keys.md."""
    plain: Any = OmegaConf.to_container(compose_overrides(()))
    top = [key for key in keys_below(Recipe) if key.path[0] not in ("logger", "strategy")]
    sections = [_FRAME, _section("Run", "", top, plain)]
    for group, names in _GROUPS.items():
        for tag, model in variants_of(fields_of(Recipe)[group]).items():
            name = names.get(tag, tag)
            keys = list(keys_below(model, (group,)))
            values = {group: _group_file(group, name)}
            title = f"{group}={name}" if group != "task" else f"task, on {tag}"
            about = model.__doc__ if tag != "local" else _first_comment(group, name)
            defaults = values if group != "task" else {}
            sections.append(_section(f"`{title}`", first_sentence(about), keys, defaults))
    sections += [_option_section(*one) for one in _options()]
    strategy = [key for key in keys_below(Recipe) if key.path[0] == "strategy"]
    sections.append(_section("`strategy`", "Of every method.", strategy, plain))
    loggers: dict[str, Any] = {}
    for path in sorted((FOLDER / "logger").glob("*.yaml")):
        loggers |= _group_file("logger", path.stem)
    logger = [key for key in keys_below(Recipe) if key.path[0] == "logger" and len(key.path) > 2]
    sections.append(
        _section("`logger`", "Of those that have settings.", logger, {"logger": loggers})
    )
    return "\n".join(sections)


def _section(title: str, about: str, keys: Sequence[FoundKey], values: Mapping[str, Any]) -> str:
    rows = [
        [f"`{key.name}`", f"`{_default(key, values)}`", *map(escape, _allowed_and_meaning(key))]
        for key in keys
        if not key.name.endswith("_target_")
    ]
    return _titled(title, about, rows)


def _titled(title: str, about: str, rows: Sequence[Sequence[str]]) -> str:
    head = f"## {title}\n\n" + (f"{escape(about)}\n\n" if about else "")
    return f"{head}{table(['key', 'default', 'allowed', 'meaning'], rows)}\n" if rows else head


def _options() -> Iterator[tuple[str, str, CatalogueEntry]]:
    """Yield the options that classes define, each with its group and name."""
    for group, known in options().items():
        for name, entry in known.items():
            yield group, name, entry


def _option_section(group: str, name: str, entry: CatalogueEntry) -> str:
    rows = [
        [f"`{key}`", f"`{shown(one['default'])}`", escape(one["allowed"]), escape(one["meaning"])]
        for key, one in entry["keys"].items()
    ]
    return _titled(f"`{group}={name}`", first_sentence(entry["summary"]), rows)


def _allowed_and_meaning(key: FoundKey) -> tuple[str, str]:
    assert key.field is not None
    return short_words(key.allowed), key.field.description or ""


def _default(key: FoundKey, values: Mapping[str, Any]) -> str:
    if not values:  # of a task: its file's, or else the schema's
        assert key.field is not None
        return "of the task" if key.field.is_required() else shown(key.field.default)
    value = value_at(values, key.path)
    return "..." if isinstance(value, dict) and value else shown(value)


def _group_file(group: str, name: str) -> dict[str, Any]:
    """Return a group's option with the options that it extends, plain."""
    content: Any = OmegaConf.to_container(OmegaConf.load(FOLDER / group / f"{name}.yaml"))
    extended: dict[str, Any] = {}
    for base in content.pop("defaults", []):
        extended |= _group_file(group, base)
    return extended | content


def _first_comment(group: str, name: str) -> str:
    text = (FOLDER / group / f"{name}.yaml").read_text(encoding="utf-8")
    return " ".join(line[2:] for line in text.split("defaults")[0].splitlines() if line[:2] == "# ")


# ---------------------------------------------------------------------------------- JSON schema
def json_schema() -> str:
    """Return the JSON schema of recipe files: no key is required, and a reference fits anywhere."""
    schema = _partial(Recipe.model_json_schema(by_alias=True))
    schema["title"] = "fedhet recipe"
    schema["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    for group, known in options().items():
        *parents, name = group.split("/")
        properties = _properties(schema, parents)
        if name in properties:  # not of the local optimizers, which stand by name
            section = group.replace("/", ".")
            properties[name]["anyOf"] += [_of_option(one, section) for one in known.values()]
    return json.dumps(schema, indent=1) + "\n"


def _properties(schema: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Return the properties of a node of the recipe."""
    node = schema
    for name in path:
        node = schema["$defs"][_reference(node["properties"][name]).rpartition("/")[2]]
    found: dict[str, Any] = node["properties"]
    return found


def _reference(node: dict[str, Any]) -> str:
    found = node if "$ref" in node else next(one for one in node["anyOf"] if "$ref" in one)
    return str(found["$ref"])


def _of_option(entry: CatalogueEntry, section: str) -> dict[str, Any]:
    """Return the JSON schema of an option's node."""
    schema: dict[str, Any] = _object()
    for name, value in leaves(entry["node"]):
        *parents, last = name.split(".")
        node = schema
        for parent in parents:
            node = node["properties"].setdefault(parent, _object())
        key = entry["keys"].get(f"{section}.{name}")
        node["properties"][last] = (
            _or_reference({**key["schema"], "description": key["meaning"]})
            if key
            else {"const": value}
        )
    return schema


def _object() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "additionalProperties": False}


def _partial(node: Any) -> Any:
    if isinstance(node, list):
        return [_partial(one) for one in node]
    if not isinstance(node, dict):
        return node
    left_out = ("required", "discriminator", "title", "default")
    found = {key: _partial(value) for key, value in node.items() if key not in left_out}
    if "oneOf" in found:  # without the key that tells them apart, several may fit
        found["anyOf"] = found.pop("oneOf")
    for key in ("properties", "$defs"):
        if key in node:
            found[key] = {name: _partial(one) for name, one in node[key].items()}
    if "properties" in found:
        found["properties"] = {n: _or_reference(one) for n, one in found["properties"].items()}
    return found


def _or_reference(node: dict[str, Any]) -> dict[str, Any]:
    about = {"description": node.pop("description")} if "description" in node else {}
    return {"anyOf": [node, _REFERENCE], **about}


# ------------------------------------------------------------------------------ comments of conf/
def commented_files() -> dict[Path, str]:
    """Return the files of conf/ whose comments are the schema's meanings."""
    paths = [path for pattern in _COMMENTED for path in sorted(FOLDER.glob(pattern))]
    return {path: _commented(path) for path in paths}


def _commented(path: Path) -> str:
    group = path.parent.relative_to(FOLDER).as_posix().removeprefix(".")
    meanings = {key.name: _comment(key) for key in _keys_of_file(group, path.stem)}
    stack: list[tuple[int, str]] = [(-1, group)] if group else []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"( *)(\w+):", line):
            indent = len(found[1])
            stack = [*(entry for entry in stack if entry[0] < indent), (indent, found[2])]
            meaning = meanings.get(".".join(key for _, key in stack))
            if meaning and (parts := _LINE.fullmatch(line)):
                start = f"{parts['indent']}{parts['key']}:{parts['value']}{parts['gap']}"
                line = f"{start}# {meaning}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _keys_of_file(group: str, name: str) -> Iterator[FoundKey]:
    if group in ("partition", "runtime"):
        yield from keys_below(variants_of(fields_of(Recipe)[group])[name], (group,))
    else:
        yield from keys_below(Recipe)


def _comment(key: FoundKey) -> str:
    """Return the meaning, with the range of a number that has one."""
    allowed, meaning = _allowed_and_meaning(key)
    bounds = re.search(r"^a (?:whole )?number (in [\[(].+?[\])]|above 0)", allowed)
    if not bounds or key.path[-1].endswith(_OBVIOUS):
        return meaning
    return f"{meaning}, {bounds[1].replace('above', '>')}"


_OBVIOUS = ("seed", "clients", "client_cpus", "client_gpus", "num_cpus", "bins", "_seconds")

"""fedhet-task: writes what a table tells, its columns and classes, as a task file for its sites.

    fedhet-task task=tabular task.path=heart.csv task.target=target out=conf/task/heart.yaml

The file has no data: the names of the columns, which of them are numbers, the classes, and how CSV
files are written. In a project's conf/task/ it makes task=heart, which sites read their own tables
by (partition=site); their columns are then fitted together (task.data_options.fit=federated).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from fedhet.commands import reported_errors
from fedhet.common.errors import ConfigError
from fedhet.common.files import save_text, writable_file
from fedhet.conf import compose, plain_part
from fedhet.tasks import tabular
from fedhet.tasks.config import OwnConfig, read_config


def main() -> None:
    """Run the command."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words) or not words:
        print(__doc__)
        return
    console = Console(soft_wrap=True, highlight=False, markup=False)
    with reported_errors("fedhet-task"):
        out = next((word.removeprefix("out=") for word in words if word.startswith("out=")), None)
        recipe = compose({"overrides": json.dumps([w for w in words if not w.startswith("out=")])})
        config = read_config(plain_part(recipe, "task"))
        if not isinstance(config, OwnConfig) or config.data != tabular.REFERENCE:
            raise ConfigError(f"task={config.name} reads no table: set task=tabular")
        if config.path is None:
            raise ConfigError("task.path=null: name the table to read")
        path = None if out is None else writable_file(Path(out).expanduser(), "out=")
        text = task_file(tabular.inferred(config), path.stem if path else "NAME")
        for line in tabular.described(tabular.inferred(config)):
            console.print(line)
        if path is None:
            console.print(f"\n{text}")
            return
        save_text(path, text)
    console.print(f"task file: {path}")


def task_file(config: OwnConfig, name: str) -> str:
    """Return a task file with an inferred table's columns and classes."""
    options = dict(config.data_options or {})
    kept = {
        key: options[key] for key, usual in tabular.DIALECT.items() if options.get(key) != usual
    }
    content: dict[str, Any] = {
        "defaults": ["tabular", "_self_"],
        "name": name,
        "kind": config.kind,
        "target": config.target,
        "client_column": config.client_column,
        "data_options": {
            "fit": "federated",
            "numeric": list(options["numeric"]),
            "categorical": list(options["categorical"]),
            **kept,
        },
        "classes": None if config.class_names is None else list(config.class_names),
    }
    head = f"# A table with the columns of {Path(str(config.path)).name}, as fedhet-task read it.\n"
    return head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


if __name__ == "__main__":
    main()

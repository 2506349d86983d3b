"""The papers' experiments: recipes in ``reproductions/<paper>/conf``, which Hydra finds, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedhet.conf.project import conf_folders


def experiment_files() -> dict[str, Path]:
    """Return the files that ``+experiment=NAME`` finds, by name, the project's included."""
    found = {
        path.relative_to(folder / "experiment").with_suffix("").as_posix(): path
        for folder in conf_folders()
        for path in (folder / "experiment").rglob("*.yaml")
    }
    return dict(sorted(found.items()))


def read_experiment(path: Path) -> dict[str, Any]:
    """Return what an experiment file and the ``/base`` files in its defaults say, unresolved.

    Composing the whole recipe would take a tenth of a second.
    """
    plain: Any = OmegaConf.to_container(_merged(path))
    return dict(plain)


def _merged(path: Path) -> DictConfig:
    content = OmegaConf.load(path)
    assert isinstance(content, DictConfig)
    bases = [one for one in content.pop("defaults", []) if isinstance(one, str)]
    files = [folder / f"{base[1:]}.yaml" for base in bases for folder in conf_folders()]
    merged = OmegaConf.merge(*(_merged(file) for file in files if file.is_file()), content)
    assert isinstance(merged, DictConfig)
    return merged

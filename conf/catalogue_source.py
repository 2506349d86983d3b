"""Gives Hydra the catalogue: ``strategy=fedprox`` and ``system=lognormal`` are no files."""

from __future__ import annotations

from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from fedhet.common.errors import ConfigError
from fedhet.conf.catalogue import METHODS, is_own, method_of, methods, options


class CatalogueSource(ConfigSource):
    """Options by their name, and methods also by their class, ``package.module:Class``."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of the search path's entry."""
        return "catalogue"

    def available(self) -> bool:
        """Return that the catalogue is always there."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether it is a group of the catalogue."""
        return config_path == METHODS or config_path in options()

    def is_config(self, config_path: str) -> bool:
        """Return whether it is a method or an option."""
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        if group == METHODS:
            return name in methods() or is_own(name)
        return name in options().get(group, ())

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names in a group, where they are asked for."""
        if results_filter not in (None, ObjectType.CONFIG):
            return []
        return sorted(methods() if config_path == METHODS else options().get(config_path, ()))

    def load_config(self, config_path: str) -> ConfigResult:
        """Return what a recipe takes from a method or an option."""
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        if group == METHODS:
            return self._result(_method(name), package="_global_")
        return self._result(options()[group][name]["node"], package=group.replace("/", "."))

    def _result(self, node: dict[str, Any], package: str) -> ConfigResult:
        return ConfigResult(
            config=OmegaConf.create(node),
            path=f"{self.scheme()}://{self.path}",
            provider=self.provider,
            header={"package": package},
        )


def _method(name: str) -> dict[str, Any]:
    try:
        found = method_of(name)
    except ConfigError as error:
        raise ConfigLoadError(str(error)) from error
    chosen = [{f"override /{group}": option} for group, option in found["groups"].items()]
    return {"defaults": [*chosen, "_self_"], **found["node"]}

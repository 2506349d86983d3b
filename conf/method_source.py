"""Gives Hydra the methods: ``strategy=fedprox`` is an entry of the catalogue, and no file."""

from __future__ import annotations

from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import OmegaConf

from fedhet.common.errors import ConfigError
from fedhet.conf.catalogue import GROUP, catalogue, entry, is_own


class MethodSource(ConfigSource):
    """The group ``strategy``: a method by its name, or by its class, ``package.module:Class``."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of the search path's entry."""
        return "methods"

    def available(self) -> bool:
        """Return that methods are always there."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether it is the methods' group."""
        return config_path == GROUP

    def is_config(self, config_path: str) -> bool:
        """Return whether it is a method."""
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return group == GROUP and (name in catalogue() or is_own(name))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the methods' names, where they are asked for."""
        wanted = config_path == GROUP and results_filter in (None, ObjectType.CONFIG)
        return sorted(catalogue()) if wanted else []

    def load_config(self, config_path: str) -> ConfigResult:
        """Return what a recipe takes from a method."""
        name = config_path.removesuffix(".yaml").rpartition("/")[2]
        try:
            found = entry(name)
        except ConfigError as error:
            raise ConfigLoadError(str(error)) from error
        node: dict[str, Any] = {
            "defaults": [
                *({f"override /{group}": option} for group, option in found["groups"].items()),
                "_self_",
            ],
            **found["node"],
        }
        return ConfigResult(
            config=OmegaConf.create(node),
            path=f"{self.scheme()}://{self.path}",
            provider=self.provider,
            header={"package": "_global_"},
        )

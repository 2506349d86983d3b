"""A task on the user's own table, whose columns are found out or fitted by all sites together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedhet.tasks import tabular
from fedhet.tasks.column_statistics import ColumnStatistics
from fedhet.tasks.config import OwnConfig
from fedhet.tasks.own_data import Functions
from fedhet.tasks.own_task import OwnTask
from fedhet.tasks.partitions import PartitionConfig

PUBLIC_COLUMNS = "public_columns"  # in a model's metadata: the columns of a table's public part


class TableTask(OwnTask):
    """A task whose data function is :func:`fedhet.tasks.tabular.load`.

    Args:
        columns: the statistics of the table's columns, if the sites have fitted them together.

    The others are :class:`OwnTask`'s.
    """

    def __init__(
        self,
        config: OwnConfig,
        partition: PartitionConfig,
        seed: int,
        num_clients: int,
        functions: Functions,
        columns: str | None = None,
    ) -> None:
        super().__init__(config, partition, seed, num_clients, functions)
        self.columns = columns
        if partition.name != "site":
            self.config = tabular.inferred(config)

    @property
    def fits_columns(self) -> bool:
        """Whether the sites fit the columns of their tables together, before round 1."""
        return (self.config.data_options or {}).get("fit") == "federated"

    @property
    def about(self) -> list[str]:
        """Lines that say how a table is read whose columns have been found out."""
        return [] if self.by_folder else tabular.described(self.config)

    def label_metadata(self) -> dict[str, str]:
        """Return the metadata of a model's file: the classes, the kind of task and the columns."""
        found = super().label_metadata()
        if self.columns is not None:
            return {**found, "columns": self.columns}
        public = tabular.fitted_options(self.config.arguments)
        return {**found, PUBLIC_COLUMNS: json.dumps(public)} if public else found

    def site_name(self, folder: Path | str | None) -> str | None:
        """Return the value of ``task.client_column``, if all rows of a site's table have one."""
        if not self.by_folder or self.config.client_column is None or folder is None:
            return None
        return tabular.site_name(self.config.arguments, Path(folder).expanduser())

    def column_statistics(
        self, client_id: int, site_folder: Path | str | None = None
    ) -> ColumnStatistics:
        """Return a client's statistics of its training rows, to fit columns together."""
        train, _ = self._parts_of(client_id, site_folder)
        folder = Path(site_folder).expanduser() if self.by_folder and site_folder else None
        # Before the fit, an example's only input is the number of its row.
        return tabular.statistics_of(train[0][:, 0], self.config.arguments, folder)

    def _known_to_data(self) -> dict[str, Any]:
        known = super()._known_to_data()
        return {**known, "fitted": self.columns} if self.fits_columns else known

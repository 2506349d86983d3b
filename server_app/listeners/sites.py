"""Who the sites are: sites.json, with a record for each client that the server has heard of."""

from __future__ import annotations

import json
from pathlib import Path

from fedhet.common.files import save_text
from fedhet.common.results import SITES
from fedhet.server_app.listeners import End, Listener
from fedhet.strategies.federated import FederatedStrategy


class Sites(Listener):
    """Writes names, numbers of examples, and which clients never train, when the run is complete.

    Args:
        folder: the results directory.
        strategy: has registered the clients.
    """

    def __init__(self, folder: Path, strategy: FederatedStrategy) -> None:
        self._folder, self._strategy = folder, strategy

    def on_end(self, end: End) -> None:
        """Write the file."""
        if not end.is_completed:
            return
        registry = self._strategy.availability.registry
        unseen = self._strategy.federation.unseen
        sites = [
            {
                "client": client,
                "name": registry.names.get(client, ""),
                "examples": registry.num_examples[client] or None,  # a secure sum hides it
                "held_out": registry.num_held_out[client],
                "unseen": client in unseen,
            }
            for client in sorted(registry.num_examples)
        ]
        save_text(self._folder / SITES, json.dumps({"sites": sites}) + "\n")

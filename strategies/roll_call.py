"""Before round 1: ask every node who it is, and refuse a federation that cannot be right."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from strategies.base import ConfigError
from strategies.records import client_card

_POLL_SECONDS = 0.2
_REPORT_SECONDS = 10.0
_SIZE_HINT = (
    "set clients to the number of SuperNodes, or start as many: flwr run . --federation-config "
    "'num-supernodes=N client-resources-num-cpus=1' (clients=0: as many as there are)"
)


@dataclass(frozen=True)
class Population:
    """The federation: node ids and example counts by client (partition) id."""

    nodes: Mapping[int, int]
    num_examples: Mapping[int, int]

    def __len__(self) -> int:
        """Return N."""
        return len(self.nodes)


def roll_call(
    grid: Grid, size: int, fingerprint: Mapping[str, str], timeout_seconds: float
) -> Population:
    """Ask every connected node for its partition id, example count and hashes.

    Args:
        grid: Flower's connection to the nodes.
        size: N, the number of clients expected; 0 takes as many as their node configs speak of.
        fingerprint: hashes (of the recipe, of the code) that every node must share.
        timeout_seconds: how long to wait for N nodes to be connected and to answer.

    Raises:
        ConfigError: two nodes with one partition id, a node with other code or recipe, partition
            ids other than 0..N-1, a node that cannot answer.
        TimeoutError: too few nodes.
    """
    node_ids = _wait_for_nodes(grid, max(size, 1), timeout_seconds)
    cards = _ask(grid, node_ids, timeout_seconds)
    if size == 0:
        size = max(int(str(card["num-partitions"])) for card in cards.values())
        if len(cards) < size:
            node_ids = _wait_for_nodes(grid, size, timeout_seconds)
            cards |= _ask(grid, [n for n in node_ids if n not in cards], timeout_seconds)
        log(INFO, "clients=0: the %s connected SuperNodes are the clients", size)
    _check_fingerprints(cards, fingerprint)
    nodes = _by_partition(cards, size)
    releases = sorted({str(card.get("versions", "")) for card in cards.values()})
    if len(releases) > 1:  # allowed, but the same seed then need not give the same bits
        log(WARNING, "the nodes run different versions: %s", releases)
    examples = {client: int(str(cards[node]["num-examples"])) for client, node in nodes.items()}
    log(INFO, "Roll call: %s clients, %s examples", size, sum(examples.values()))
    return Population(nodes, examples)


def _wait_for_nodes(grid: Grid, size: int, timeout_seconds: float) -> list[int]:
    start = last_report = time.monotonic()
    while len(node_ids := sorted(grid.get_node_ids())) < size:
        now = time.monotonic()
        if now - start > timeout_seconds:
            raise TimeoutError(
                f"clients={size}, but only {len(node_ids)} SuperNodes are connected after "
                f"{timeout_seconds:.0f} s (runtime.connect_timeout_seconds); {_SIZE_HINT}"
            )
        if now - last_report > _REPORT_SECONDS:
            log(INFO, "Waiting for SuperNodes: %s of %s connected", len(node_ids), size)
            last_report = now
        time.sleep(_POLL_SECONDS)
    return node_ids


def _ask(grid: Grid, node_ids: list[int], timeout_seconds: float) -> dict[int, ConfigRecord]:
    questions = [
        Message(content=RecordDict(), message_type=MessageType.QUERY, dst_node_id=node_id)
        for node_id in node_ids
    ]
    cards: dict[int, ConfigRecord] = {}
    for answer in grid.send_and_receive(questions, timeout=timeout_seconds):
        if answer.has_error():
            raise ConfigError(
                f"node {answer.metadata.src_node_id} cannot take part: {answer.error.reason}"
            )
        cards[answer.metadata.src_node_id] = client_card(answer.content)
    silent = sorted(set(node_ids) - cards.keys())
    if silent:
        log(WARNING, "nodes %s did not answer the roll call", silent)
    return cards


def _check_fingerprints(cards: Mapping[int, ConfigRecord], fingerprint: Mapping[str, str]) -> None:
    for node_id, card in cards.items():
        for name, value in fingerprint.items():
            theirs = card.get(name)
            if theirs != value:
                raise ConfigError(
                    f"node {node_id} (partition {card['partition-id']!r}) runs another {name}: "
                    f"{theirs!r}, the server has {value!r}; give every site the same "
                    "release and the same recipe, then start again"
                )


def _by_partition(cards: Mapping[int, ConfigRecord], size: int) -> dict[int, int]:
    nodes: dict[int, int] = {}
    for node_id, card in sorted(cards.items()):
        client = int(str(card["partition-id"]))
        if client in nodes:
            raise ConfigError(
                f"nodes {nodes[client]} and {node_id} both say partition-id={client}; give each "
                "SuperNode its own in --node-config"
            )
        nodes[client] = node_id
    if set(nodes) != set(range(size)):
        raise ConfigError(
            f"clients={size} needs the partition ids 0..{size - 1}, but the {len(nodes)} connected "
            f"nodes have {sorted(nodes)[:20]}; {_SIZE_HINT}"
        )
    return dict(sorted(nodes.items()))

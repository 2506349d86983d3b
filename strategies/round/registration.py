"""Registration of the clients before round 1, and which of them are connected before each round."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid

from common.errors import ConfigError
from strategies.round.records import parse_node_info

_POLL_SECONDS = 0.2
_WAIT_POLL_SECONDS = 1.0  # for clients to come back before a round
_REPORT_SECONDS = 10.0
_SIZE_HINT = (
    "set clients to the number of SuperNodes, or start as many: flwr run . --federation-config "
    "'num-supernodes=N client-resources-num-cpus=1' (clients=0: as many as there are)"
)


@dataclass
class ClientRegistry:
    """The federation: N, and node ids and example counts by client (partition) id.

    A client that has not joined yet is in neither.
    """

    size: int
    nodes: dict[int, int]
    num_examples: dict[int, int]

    def __len__(self) -> int:
        """Return N."""
        return self.size


def register_clients(
    grid: Grid,
    size: int,
    fingerprint: Mapping[str, str],
    timeout_seconds: float,
    min_clients: int | None = None,
) -> ClientRegistry:
    """Ask every connected node for its partition id, example count and hashes.

    Args:
        grid: Flower's connection to the nodes.
        size: N, the number of clients expected; 0 takes as many as their node configs speak of.
        fingerprint: hashes (of the recipe, of the code) that every node must share.
        timeout_seconds: how long to wait for N nodes to be connected, and then for answers.
        min_clients: so many of the N are enough when that time is over; None: all.

    Raises:
        ConfigError: two nodes with one partition id, a node with other code or recipe, partition
            ids other than 0..N-1, a node that cannot answer, silent nodes.
        TimeoutError: too few nodes.
    """
    end = time.monotonic() + timeout_seconds
    node_infos: dict[int, ConfigRecord] = {}
    expected = size or 1
    while True:
        enough = expected if min_clients is None else min(min_clients, expected)
        node_ids = _wait_for_nodes(grid, expected, enough, end, timeout_seconds)
        node_infos = {node: node_info for node, node_info in node_infos.items() if node in node_ids}
        strangers = [node for node in node_ids if node not in node_infos]
        node_infos |= _ask(grid, strangers, timeout_seconds)
        told = max(map(_num_partitions, node_infos.values()), default=1) if size == 0 else size
        if told == expected and (len(node_infos) >= expected or time.monotonic() > end):
            break
        expected = told
    if size == 0:
        log(INFO, "clients=0: the %s SuperNodes of the node configs are the clients", expected)
    for node, node_info in node_infos.items():
        _check_fingerprint(node, node_info, fingerprint)
    registry = _by_partition(node_infos, expected, enough)
    releases = sorted({str(node_info.get("versions", "")) for node_info in node_infos.values()})
    if len(releases) > 1:  # allowed, but the same seed then need not give the same bits
        log(WARNING, "the nodes run different versions: %s", releases)
    examples = sum(registry.num_examples.values())
    log(INFO, "Roll call: %s clients, %s examples", len(registry.nodes), examples)
    missing = sorted(set(range(expected)) - registry.nodes.keys())
    if missing:
        log(WARNING, "clients %s are not there; they may join later", missing)
    return registry


class LateJoiners:
    """Lets nodes into a run that connect after its roll call.

    Such a node plays a client that was not there, or one whose node is gone: a site with a new
    key. It is asked who it is beside the rounds, which wait for no answer.
    """

    def __init__(self, registry: ClientRegistry, fingerprint: Mapping[str, str]) -> None:
        """Know those who are in.

        Args:
            registry: of the roll call; who is let in is added to it.
            fingerprint: hashes that every node must share.
        """
        self._registry, self._fingerprint = registry, fingerprint
        self._asked: dict[int, str] = {}  # by node, the question's message id
        self._refused: set[int] = set()

    def admit(self, grid: Grid, connected: Collection[int]) -> None:
        """Ask those who are new, and let in or refuse those who have answered.

        Args:
            grid: Flower's connection to the nodes.
            connected: the nodes that are there now.
        """
        there = set(connected)
        self._asked = {node: asked for node, asked in self._asked.items() if node in there}
        self._refused &= there  # one that comes again is asked again
        known = {*self._registry.nodes.values(), *self._asked, *self._refused}
        strangers = sorted(there - known)
        if strangers:
            ids = grid.push_messages([_question(node) for node in strangers])
            self._asked |= dict(zip(strangers, ids, strict=True))
        if not self._asked:
            return
        nodes = {asked: node for node, asked in self._asked.items()}
        for answer in grid.pull_messages(list(nodes)):
            node = nodes[answer.metadata.reply_to_message_id]
            del self._asked[node]
            try:
                self._let_in(node, answer, there)
            except ConfigError as refusal:
                self._refused.add(node)
                log(WARNING, "refused to let in a node that came late: %s", refusal)

    def _let_in(self, node: int, answer: Message, there: Collection[int]) -> None:
        node_info = _node_info(node, answer)
        _check_fingerprint(node, node_info, self._fingerprint)
        client = _partition(node_info)
        if not 0 <= client < len(self._registry):
            raise ConfigError(
                f"node {node} says partition-id={client}: {_range_of(self._registry)}"
            )
        other = self._registry.nodes.get(client)
        if other is not None and other in there:
            raise ConfigError(_both(client, node, other))
        self._registry.nodes[client] = node
        self._registry.num_examples[client] = _num_examples(node_info)
        log(INFO, "client %s has joined: node %s", client, node)


class ClientAvailability:
    """Which clients are connected, of those that answered the roll call or have joined since.

    Args:
        registry: of the roll call; who joins later is added to it.
        fingerprint: hashes that every node must share with the server.
        least: so many clients are waited for, or all where there are fewer (min_replies).
        timeout_seconds: how long they are waited for.
    """

    def __init__(
        self,
        registry: ClientRegistry,
        fingerprint: Mapping[str, str],
        least: int,
        timeout_seconds: float,
    ) -> None:
        self.registry = registry
        self.absent: frozenset[int] = frozenset()
        self._late_joiners = LateJoiners(registry, fingerprint)
        self._least = min(least, len(registry))
        self._timeout_seconds = timeout_seconds

    @property
    def present(self) -> list[int]:
        """The clients that were connected at the last look, in order."""
        return sorted(self.registry.nodes.keys() - self.absent)

    def refresh(self, grid: Grid) -> None:
        """Find out who is connected; wait while too few are.

        Raises:
            TimeoutError: if they are too few for longer than the timeout.
        """
        began = time.monotonic()
        while self._look(grid) < self._least:
            if time.monotonic() - began > self._timeout_seconds:
                present = len(self.registry) - len(self.absent)
                raise TimeoutError(
                    f"min_replies={self._least}, but only {present} of {len(self.registry)} "
                    f"clients are connected after {self._timeout_seconds:.0f} s "
                    "(runtime.connect_timeout_seconds)"
                )
            time.sleep(_WAIT_POLL_SECONDS)

    def _look(self, grid: Grid) -> int:
        """Let in who is new, name who has gone or come back, return how many are there."""
        connected = set(grid.get_node_ids())
        self._late_joiners.admit(grid, connected)
        nodes = self.registry.nodes
        clients = range(len(self.registry))
        absent = frozenset(client for client in clients if nodes.get(client) not in connected)
        if absent != self.absent:
            log(WARNING, "clients that are not connected: %s", sorted(absent) or "none")
        self.absent = absent
        return len(self.registry) - len(absent)


# ---- asking, and reading the answers -------------------------------------------------------------


def _wait_for_nodes(
    grid: Grid, size: int, enough: int, end: float, timeout_seconds: float
) -> list[int]:
    last_report = time.monotonic()
    while len(node_ids := sorted(grid.get_node_ids())) < size:
        now = time.monotonic()
        if now > end and len(node_ids) >= enough:
            break
        if now > end:
            least = "" if enough == size else f" (min_clients={enough})"
            raise TimeoutError(
                f"clients={size}{least}, but only {len(node_ids)} SuperNodes are connected after "
                f"{timeout_seconds:.0f} s (runtime.connect_timeout_seconds); {_SIZE_HINT}"
            )
        if now - last_report > _REPORT_SECONDS:
            log(INFO, "Waiting for SuperNodes: %s of %s connected", len(node_ids), size)
            last_report = now
        time.sleep(_POLL_SECONDS)
    return node_ids


def _question(node_id: int) -> Message:
    return Message(content=RecordDict(), message_type=MessageType.QUERY, dst_node_id=node_id)


def _ask(grid: Grid, node_ids: list[int], timeout_seconds: float) -> dict[int, ConfigRecord]:
    """Return the node_infos by node; without those that have gone, or are silent."""
    if not node_ids:
        return {}
    questions = [_question(node_id) for node_id in node_ids]
    node_infos: dict[int, ConfigRecord] = {}
    for answer in grid.send_and_receive(questions, timeout=timeout_seconds):
        if answer.has_error() and answer.error.code == ErrorCode.NODE_UNAVAILABLE:
            continue  # killed a minute ago; the SuperLink has only now noticed
        node_infos[answer.metadata.src_node_id] = _node_info(answer.metadata.src_node_id, answer)
    silent = sorted(set(node_ids) - node_infos.keys())
    if silent:
        log(WARNING, "nodes %s did not answer the roll call", silent)
    return node_infos


def _node_info(node: int, answer: Message) -> ConfigRecord:
    if answer.has_error():
        raise ConfigError(f"node {node} cannot take part: {answer.error.reason}")
    return parse_node_info(answer.content)


def _partition(node_info: ConfigRecord) -> int:
    return int(str(node_info["partition-id"]))


def _num_partitions(node_info: ConfigRecord) -> int:
    return int(str(node_info["num-partitions"]))


def _num_examples(node_info: ConfigRecord) -> int:
    return int(str(node_info["num-examples"]))


def _check_fingerprint(
    node_id: int, node_info: ConfigRecord, fingerprint: Mapping[str, str]
) -> None:
    for name, value in fingerprint.items():
        theirs = node_info.get(name)
        if theirs != value:
            raise ConfigError(
                f"node {node_id} (partition {node_info['partition-id']!r}) runs another {name}: "
                f"{theirs!r}, the server has {value!r}; give every site the same "
                "release and the same recipe, then start again"
            )


def _by_partition(node_infos: Mapping[int, ConfigRecord], size: int, enough: int) -> ClientRegistry:
    registry = ClientRegistry(size, {}, {})
    for node_id, node_info in sorted(node_infos.items()):
        client = _partition(node_info)
        if client in registry.nodes:
            raise ConfigError(_both(client, registry.nodes[client], node_id))
        registry.nodes[client] = node_id
        registry.num_examples[client] = _num_examples(node_info)
    nodes = dict(sorted(registry.nodes.items()))
    if not nodes.keys() <= set(range(size)) or len(nodes) < enough:
        raise ConfigError(
            f"{_range_of(registry)}, but the {len(nodes)} connected "
            f"nodes have {sorted(nodes)[:20]}; {_SIZE_HINT}"
        )
    registry.nodes = nodes
    return registry


def _range_of(registry: ClientRegistry) -> str:
    return f"clients={len(registry)} needs the partition ids 0..{len(registry) - 1}"


def _both(client: int, first: int, second: int) -> str:
    return (
        f"nodes {first} and {second} both say partition-id={client}; give each SuperNode its own "
        "in --node-config"
    )

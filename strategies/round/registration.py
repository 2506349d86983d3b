"""Registration of the clients before round 1, and which of them are connected before each round."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid

from common.errors import ConfigError, require_whole
from strategies.round.records import CLIENT

_POLL_SECONDS = 0.2
_WAIT_POLL_SECONDS = 1.0  # for clients to come back before a round
_REPORT_SECONDS = 10.0
_SIZE_HINT = (
    "set clients to the number of SuperNodes, or start as many: flwr run . --federation-config "
    "'num-supernodes=N client-resources-num-cpus=1' (clients=0: as many as there are)"
)


@dataclass(frozen=True)
class FederationConfig:
    """How many clients a run has, and how many of them it needs."""

    num_clients: int = 0  # N; 0 reads it from the node configs
    # enough for round 1 after the timeout, as the others may join later; None requires all N
    min_clients: int | None = None
    # a round waits for this many connected clients; with fewer valid replies the model stays
    min_replies: int = 1
    max_failed_rounds: int = 3  # this many such rounds in a row end the run with an error
    connect_timeout_seconds: float = 600.0  # to wait before round 1, and before any round
    # hashes (of the recipe, of the code) that every node must share
    fingerprint: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.min_clients is not None:
            require_whole("runtime.min_clients", self.min_clients, low=1)
        require_whole("min_replies", self.min_replies, low=1)
        require_whole("max_failed_rounds", self.max_failed_rounds, low=1)

    def check_cohort(self, num_clients: int, most: int) -> None:
        """Refuse to wait for more replies than the ``most`` clients of a round can give."""
        if self.min_replies > most:
            raise ConfigError(
                f"min_replies={self.min_replies}, but of the {num_clients} clients at most {most} "
                f"take part in a round (participation): set min_replies to {most} or less"
            )

    def check_failed_rounds(self, failed: int, num_valid: int, failures: Sequence[str]) -> None:
        """Log the last of ``failed`` failed rounds in a row; raise RuntimeError if too many."""
        least, most = self.min_replies, self.max_failed_rounds
        log(WARNING, "%s valid replies, min_replies=%s: the model is unchanged", num_valid, least)
        if failed >= most:
            raise RuntimeError(
                f"{failed} rounds in a row had fewer than min_replies={least} valid replies "
                f"(max_failed_rounds={most}); the last failures: {'; '.join(failures[:5])}"
            )


@dataclass
class ClientRegistry:
    """The registered clients: N, and node ids and example counts by client (partition) id.

    A client that has not joined yet is in neither mapping.
    """

    size: int
    nodes: dict[int, int]
    num_examples: dict[int, int]

    def __len__(self) -> int:
        """Return N."""
        return self.size

    def add(self, node: int, info: ConfigRecord) -> int:
        """Register a client's node and return the client's id."""
        client = _partition(info)
        self.nodes[client] = node
        self.num_examples[client] = int(str(info["num-examples"]))
        return client


def register_clients(grid: Grid, federation: FederationConfig) -> ClientRegistry:
    """Ask every connected node for its partition id, example count and hashes.

    A ConfigError says which nodes do not fit, a TimeoutError that they are too few.
    """
    size, timeout = federation.num_clients, federation.connect_timeout_seconds
    end = time.monotonic() + timeout
    infos: dict[int, ConfigRecord] = {}
    expected = size or 1
    while True:
        enough = min(federation.min_clients or expected, expected)
        connected = _wait_for_nodes(grid, expected, enough, end, timeout)
        infos = {node: info for node, info in infos.items() if node in connected}
        infos |= _ask(grid, [node for node in connected if node not in infos], timeout)
        announced = size or max((int(str(i["num-partitions"])) for i in infos.values()), default=1)
        if announced == expected and (len(infos) >= expected or time.monotonic() > end):
            break
        expected = announced
    if size == 0:
        log(INFO, "clients=0: the node configs announce %s clients", expected)
    for node, info in infos.items():
        _check_fingerprint(node, info, federation.fingerprint)
    registry = _registry_of(infos, expected, enough)
    releases = sorted({str(info.get("versions", "")) for info in infos.values()})
    if len(releases) > 1:  # allowed, but the same seed may then give other bits
        log(WARNING, "the nodes run different versions: %s", releases)
    examples = sum(registry.num_examples.values())
    log(INFO, "Registered %s clients with %s examples", len(registry.nodes), examples)
    if missing := sorted(set(range(expected)) - registry.nodes.keys()):
        log(WARNING, "clients %s are not connected; they may join later", missing)
    return registry


class ClientAvailability:
    """Tracks which of the registered clients are connected, and adds late joiners to them.

    A late joiner plays a client that is missing, or one whose node is gone. It is asked beside the
    rounds, which do not wait for its answer.
    """

    def __init__(self, registry: ClientRegistry, federation: FederationConfig) -> None:
        self.registry, self._federation = registry, federation
        self.absent: frozenset[int] = frozenset()
        self._asked: dict[int, str] = {}  # by late node, the question's message id
        self._refused: set[int] = set()

    @property
    def present(self) -> list[int]:
        """The clients that were connected at the last refresh, in order."""
        return sorted(self.registry.nodes.keys() - self.absent)

    def refresh(self, grid: Grid) -> None:
        """Look up which clients are connected; wait while they are fewer than ``min_replies``.

        Raises:
            TimeoutError: if they are too few for longer than the timeout.
        """
        size, timeout = len(self.registry), self._federation.connect_timeout_seconds
        least, end = min(self._federation.min_replies, size), time.monotonic() + timeout
        while (present := self._look_up(grid)) < least:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"min_replies={least}, but only {present} of {size} clients are connected "
                    f"after {timeout:.0f} s (runtime.connect_timeout_seconds)"
                )
            time.sleep(_WAIT_POLL_SECONDS)

    def _look_up(self, grid: Grid) -> int:
        """Register late joiners, log who left or came back, and return how many are connected."""
        connected = set(grid.get_node_ids())
        self._admit(grid, connected)
        nodes, clients = self.registry.nodes, range(len(self.registry))
        absent = frozenset(client for client in clients if nodes.get(client) not in connected)
        if absent != self.absent:
            log(WARNING, "clients that are not connected: %s", sorted(absent) or "none")
        self.absent = absent
        return len(self.registry) - len(absent)

    def _admit(self, grid: Grid, connected: set[int]) -> None:
        """Ask the new ones of the connected nodes, and register or refuse those that answered."""
        self._asked = {node: asked for node, asked in self._asked.items() if node in connected}
        self._refused &= connected  # a node that reconnects is asked again
        known = {*self.registry.nodes.values(), *self._asked, *self._refused}
        if new := sorted(connected - known):
            ids = grid.push_messages([_question(node) for node in new])
            self._asked |= dict(zip(new, ids, strict=True))
        if not self._asked:
            return
        nodes = {asked: node for node, asked in self._asked.items()}
        for answer in grid.pull_messages(list(nodes)):
            node = nodes[answer.metadata.reply_to_message_id]
            del self._asked[node]
            try:
                self._register(node, answer, connected)
            except ConfigError as refusal:
                self._refused.add(node)
                log(WARNING, "refused a node that joined late: %s", refusal)

    def _register(self, node: int, answer: Message, connected: set[int]) -> None:
        info = _node_info(node, answer)
        _check_fingerprint(node, info, self._federation.fingerprint)
        client = _partition(info)
        if not 0 <= client < len(self.registry):
            raise ConfigError(f"node {node} has partition-id={client}: {_ids_of(self.registry)}")
        other = self.registry.nodes.get(client)
        if other is not None and other in connected:
            raise ConfigError(_duplicate(client, node, other))
        self.registry.add(node, info)
        log(INFO, "client %s has joined: node %s", client, node)


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
    """Return the answers by node, without nodes that have gone or are silent."""
    if not node_ids:
        return {}
    infos: dict[int, ConfigRecord] = {}
    for answer in grid.send_and_receive(
        [_question(node) for node in node_ids], timeout=timeout_seconds
    ):
        if answer.has_error() and answer.error.code == ErrorCode.NODE_UNAVAILABLE:
            continue  # the SuperLink notices a killed node only after a minute
        node = answer.metadata.src_node_id
        infos[node] = _node_info(node, answer)
    if silent := sorted(set(node_ids) - infos.keys()):
        log(WARNING, "nodes %s did not answer the registration", silent)
    return infos


def _node_info(node: int, answer: Message) -> ConfigRecord:
    if answer.has_error():
        raise ConfigError(f"node {node} cannot take part: {answer.error.reason}")
    return answer.content.config_records.get(CLIENT, ConfigRecord())


def _partition(info: ConfigRecord) -> int:
    return int(str(info["partition-id"]))


def _check_fingerprint(node_id: int, info: ConfigRecord, fingerprint: Mapping[str, str]) -> None:
    for name, value in fingerprint.items():
        theirs = info.get(name)
        if theirs != value:
            raise ConfigError(
                f"node {node_id} (partition {info['partition-id']!r}) runs another {name}: "
                f"{theirs!r}, the server has {value!r}; give every site the same "
                "release and the same recipe, then start again"
            )


def _registry_of(infos: Mapping[int, ConfigRecord], size: int, enough: int) -> ClientRegistry:
    registry = ClientRegistry(size, {}, {})
    for node_id, info in sorted(infos.items()):
        if (other := registry.nodes.get(_partition(info))) is not None:
            raise ConfigError(_duplicate(_partition(info), other, node_id))
        registry.add(node_id, info)
    registry.nodes = dict(sorted(registry.nodes.items()))
    if not registry.nodes.keys() <= set(range(size)) or len(registry.nodes) < enough:
        raise ConfigError(
            f"{_ids_of(registry)}, but the {len(registry.nodes)} connected "
            f"nodes have {list(registry.nodes)[:20]}; {_SIZE_HINT}"
        )
    return registry


def _ids_of(registry: ClientRegistry) -> str:
    return f"clients={len(registry)} needs the partition ids 0..{len(registry) - 1}"


def _duplicate(client: int, first: int, second: int) -> str:
    return (
        f"nodes {first} and {second} both have partition-id={client}; give each SuperNode its own "
        "in --node-config"
    )

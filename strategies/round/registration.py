"""Registration of the clients before round 1."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedhet.common.errors import ConfigError, require_whole
from fedhet.common.flower.messages import ErrorCode
from fedhet.strategies.base import RefusedReplyError
from fedhet.strategies.round.exact_sum import MOST_SUMMANDS
from fedhet.strategies.wire.border import NodeInfo, decode_node_info
from fedhet.strategies.wire.messages import TIMEOUT
from fedhet.strategies.wire.records import CONFIG, UNASKED, matched

NAME, MOST_LETTERS = "name", 80  # of a client, and how long it may be
CANNOT_TRAIN = "cannot-train"  # why a client will fail in every round
FROZEN_MODEL = "frozen-model"  # the hash of the tensors that a model neither trains nor sends
# What sites have to share for their hashes to be equal.
_SAME = {
    "recipe": "release and the same recipe",
    "code": "release and the same recipe",
    FROZEN_MODEL: "pretrained files (task.model, task.model_options)",
}
_POLL_SECONDS = 0.2
_REPORT_SECONDS = 10.0
_NAMED = 20  # clients in a warning
_MOST_ASKED = 1000  # of a larger simulation, each client is asked when it is first drawn


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
    unseen: frozenset[int] = frozenset()  # clients that are evaluated, and never trained on
    nodes_may_join: bool = True  # False: a simulation, in which nobody replaces a refused node
    # hashes (of the recipe, the code, the frozen part of the model) that every node must share
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    # sent to every node with the registration's question
    node_settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.min_clients is not None:
            require_whole("runtime.min_clients", self.min_clients, low=1)
        require_whole("min_replies", self.min_replies, low=1)
        require_whole("max_failed_rounds", self.max_failed_rounds, low=1)

    def num_trainers(self, num_clients: int) -> int:
        """Return how many of the clients may train.

        Raises:
            ConfigError: if none may, or there is no such client.
        """
        if not self.unseen < set(range(num_clients)):
            raise ConfigError(
                f"partition.unseen={sorted(self.unseen)}: name some of the clients 0 to "
                f"{num_clients - 1}, and leave at least one to train"
            )
        return num_clients - len(self.unseen)

    def check_cohort(self, num_clients: int, most: int) -> None:
        """Refuse a round of more clients than can be added up.

        Refuse to wait for more replies than the ``most`` clients of a round can give, too.
        """
        if most > MOST_SUMMANDS:
            raise ConfigError(
                f"a round of {most} of the {num_clients} clients (participation): at most "
                f"{MOST_SUMMANDS} can be added up exactly; set participation lower"
            )
        if self.min_replies > most:
            raise ConfigError(
                f"min_replies={self.min_replies}, but of the {num_clients} clients at most {most} "
                f"take part in a round (participation): set min_replies to {most} or less"
            )


@dataclass
class ClientRegistry:
    """The registered clients: N, and node ids and example counts by client (partition) id.

    A client that has not joined yet is in neither mapping.
    """

    size: int
    nodes: dict[int, int] = field(default_factory=dict)
    num_examples: dict[int, int] = field(default_factory=dict)
    num_held_out: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # of clients that have one

    def __len__(self) -> int:
        """Return N."""
        return self.size

    def add(self, node: int, info: NodeInfo, replaceable: Callable[[int], bool]) -> int:
        """Register a client's node and return the client's id.

        Raises:
            RefusedReplyError: if there is no such client, or its place is taken by a node that is
                not ``replaceable``.
        """
        client = info.partition_id
        if client >= self.size:
            raise RefusedReplyError(
                f"node {node} has partition-id={client}: clients={self.size} needs the partition "
                f"ids 0..{self.size - 1}"
            )
        if info.num_partitions != self.size:
            raise RefusedReplyError(
                f"node {node} (partition {client}) has num-partitions={info.num_partitions}, and "
                f"there are {self.size} clients: give every SuperNode the same in --node-config"
            )
        other = self.nodes.get(client)
        if other is not None and not replaceable(other):
            raise RefusedReplyError(
                f"nodes {other} and {node} both have partition-id={client}; give each SuperNode "
                "its own in --node-config"
            )
        self.nodes[client] = node
        self.num_examples[client] = info.num_examples
        self.num_held_out[client] = info.num_held_out
        if name := info.texts.get(NAME, "")[:MOST_LETTERS]:
            self.names[client] = name
        return client


def register_clients(
    grid: Grid, federation: FederationConfig, message_type: str = MessageType.QUERY
) -> ClientRegistry:
    """Ask every connected node for its partition id, example count and hashes.

    Logs a node that does not fit, and keeps it out. A TimeoutError says that too few nodes are
    left, and why the others were refused.

    A range of nodes is a simulation in which the i-th node plays client i. In a large simulation,
    clients are queried when they are first selected, unless ``message_type`` needs them all.
    """
    nodes = () if federation.nodes_may_join else grid.get_node_ids()
    is_plain = message_type == MessageType.QUERY
    if is_plain and isinstance(nodes, range) and len(nodes) > _MOST_ASKED:
        log(INFO, "%s simulated clients: each is asked when it is first drawn", len(nodes))
        return ClientRegistry(len(nodes), dict(enumerate(nodes)))
    refused: dict[int, str] = {}
    infos: dict[int, NodeInfo] = {}
    end = time.monotonic() + federation.connect_timeout_seconds
    last_report, asked = time.monotonic(), set[int]()
    while True:
        connected = sorted(grid.get_node_ids())
        infos = {node: info for node, info in infos.items() if node in connected}
        # a node that reconnects is asked again
        refused = {node: why for node, why in refused.items() if node in connected}
        over = time.monotonic() > end
        # do not wait twice for a node that was silent all the time
        heard = {*infos, *refused, *(asked if over else ())}
        new = [node for node in connected if node not in heard]
        if new and (asked or over or len(connected) >= max(federation.num_clients, 1)):
            infos |= ask(grid, new, federation, refused, message_type, infos)
            asked |= set(new)
        size = federation.num_clients or _announced(infos)
        enough = min(federation.min_clients or size, size)
        registry = _registry_of(infos, size, refused)
        answered = set(connected) <= {*infos, *refused}
        # nobody else comes in the place of a simulated client
        over = over or bool(refused and answered and not federation.nodes_may_join)
        if len(registry.nodes) >= (enough if over else size) > 0:
            break
        if over:
            raise TimeoutError(_too_few(size, enough, len(registry.nodes), federation, refused))
        if time.monotonic() - last_report > _REPORT_SECONDS:
            registered = len(registry.nodes)
            log(INFO, "Waiting for SuperNodes: %s of %s registered", registered, size or "?")
            last_report = time.monotonic()
        time.sleep(_POLL_SECONDS)
    if federation.num_clients == 0:
        log(INFO, "clients=0: the node configs announce %s clients", size)
    releases = sorted({infos[node].texts.get("versions", "") for node in registry.nodes.values()})
    if len(releases) > 1:  # allowed, but the same seed may then give other bits
        log(WARNING, "the nodes run different versions: %s", releases)
    examples = sum(registry.num_examples.values())
    log(INFO, "Registered %s clients with %s examples", len(registry.nodes), examples)
    named = [f"{client} {name}" for client, name in sorted(registry.names.items())]
    if named:
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        log(INFO, "clients: %s%s", ", ".join(named[:_NAMED]), more)
    warn_of_untrainable(infos[node] for node in registry.nodes.values())
    if federation.nodes_may_join:
        _warn_of_outweighing(registry.num_examples)
    if missing := sorted(set(range(size)) - registry.nodes.keys()):
        log(WARNING, "clients %s are not connected; they may join later", missing)
    return registry


def warn_of_untrainable(infos: Iterable[NodeInfo]) -> None:
    """Say which clients cannot train, and why."""
    clients: dict[str, list[int]] = {}
    for info in infos:
        if reason := info.texts.get(CANNOT_TRAIN):
            clients.setdefault(reason, []).append(info.partition_id)
    for reason, found in clients.items():
        text = "%s clients cannot train, and fail in every round that asks them (%s): %s"
        shown = f"{sorted(found)[:_NAMED]}{', ...' if len(found) > _NAMED else ''}"
        log(WARNING, text, len(found), shown, reason)


def _warn_of_outweighing(num_examples: Mapping[int, int]) -> None:
    """Warn of a client that claims as many examples as all others, if a mean weighs by them."""
    total = sum(num_examples.values())
    for client, examples in num_examples.items():
        if len(num_examples) > 2 and 2 * examples > total:
            log(
                WARNING,
                "client %s says that it has %s of all %s examples: in a mean by examples it weighs "
                "more than all others together",
                client,
                examples,
                total,
            )


# ---- asking, and reading the answers -------------------------------------------------------------


def question(
    node_id: int,
    federation: FederationConfig,
    message_type: str = MessageType.QUERY,
    more: Mapping[str, float] | None = None,
) -> Message:
    """Return the message that asks a node who it is."""
    config = ConfigRecord({**federation.node_settings, **(more or {})})
    content = RecordDict({CONFIG: config} if config else {})
    return Message(content=content, message_type=message_type, dst_node_id=node_id)


def ask(
    grid: Grid,
    node_ids: list[int],
    federation: FederationConfig,
    refused: dict[int, str],
    message_type: str,
    before: Mapping[int, NodeInfo] | None = None,
) -> dict[int, NodeInfo]:
    """Return the valid answers by node, without nodes that have gone or are silent.  Logs the
    others, and adds them to ``refused`` with the reason. Waits for no more nodes once all N clients
    are there, including those of ``before``.
    """
    infos: dict[int, NodeInfo] = {}
    timeout = federation.connect_timeout_seconds
    more = {TIMEOUT: timeout}
    asked = {node: question(node, federation, message_type, more) for node in node_ids}
    # 0 where N is in the node configs, which one may say wrongly: then all are waited for
    expected = 0 if before is None else federation.num_clients
    missing = set(range(expected)) - {info.partition_id for info in (before or {}).values()}
    answers = grid.send_and_receive(list(asked.values()), timeout=timeout)
    for node, answer in matched(answers, asked):
        if node is None:
            log(WARNING, "node %s: %s", answer.metadata.src_node_id, UNASKED)
            continue
        if answer.has_error() and answer.error.code == ErrorCode.NODE_UNAVAILABLE:
            continue  # the SuperLink notices a killed node only after a minute
        try:
            infos[node] = node_info(node, answer, federation)
        except RefusedReplyError as refusal:
            _refuse(node, str(refusal), refused)
        else:
            missing.discard(infos[node].partition_id)
        if expected and not missing:
            return infos
    if silent := sorted(set(node_ids) - infos.keys() - refused.keys()):
        log(WARNING, "nodes %s did not answer the registration", silent)
    return infos


def _refuse(node: int, reason: str, refused: dict[int, str]) -> None:
    if node not in refused:
        refused[node] = reason
        log(WARNING, "refused a node: %s", reason)


def node_info(node: int, answer: Message, federation: FederationConfig) -> NodeInfo:
    """Return a node's answer; refuse a node with another recipe or other code."""
    try:
        info = decode_node_info(answer)
    except RefusedReplyError as refusal:
        raise RefusedReplyError(f"node {node}: {refusal}") from None
    for name, value in federation.fingerprint.items():
        if (theirs := info.texts.get(name)) != value:
            raise RefusedReplyError(
                f"node {node} (partition {info.partition_id}) runs another {name}: {theirs!r}, the "
                f"server has {value!r}; give every site the same {_SAME[name]}, then start again"
            )
    return info


def _announced(infos: Mapping[int, NodeInfo]) -> int:
    """Return the N of most node configs, the smallest if several tie; 0 without any."""
    counts = Counter(info.num_partitions for info in infos.values())
    most = max(counts.values(), default=0)
    return min((size for size, count in counts.items() if count == most), default=0)


def _registry_of(
    infos: Mapping[int, NodeInfo], size: int, refused: dict[int, str]
) -> ClientRegistry:
    """Register the nodes that fit, the lowest node id first; refuse the others."""
    registry = ClientRegistry(size)
    for node, info in sorted(infos.items()):
        if node in refused:
            continue
        try:
            registry.add(node, info, lambda other: False)
        except RefusedReplyError as refusal:
            _refuse(node, str(refusal), refused)
    registry.nodes = dict(sorted(registry.nodes.items()))
    return registry


def _too_few(
    size: int, enough: int, there: int, federation: FederationConfig, refused: Mapping[int, str]
) -> str:
    least = "" if enough == size else f" (runtime.min_clients={enough})"
    seconds = f"{federation.connect_timeout_seconds:.0f} s (runtime.connect_timeout_seconds)"
    why = f"; refused were: {'; '.join(list(refused.values())[:5])}" if refused else ""
    if federation.nodes_may_join:
        found = f"{there} SuperNodes are registered after {seconds}"
        advice = "start the others"
        if there:
            advice += f", set clients={there}, or, if they join later, runtime.min_clients={there}"
    elif refused:  # the reasons name the keys
        return f"clients={size}{least}, but only {there} simulated clients can take part{why}"
    else:
        found = f"{there} simulated clients are there after {seconds}"
        advice = (
            "set clients to their number, or flwr run . --federation-config "
            f"'num-supernodes={size} client-resources-num-cpus=1'"
        )
    return f"clients={size}{least}, but only {found}{why}; {advice}"

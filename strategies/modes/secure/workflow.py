"""The server half of SecAgg+: five exchanges with the clients of a round, and their mean.

It speaks with Flower's ``secaggplus_mod`` and uses Flower's cryptography. Flower's own server half
(``SecAggPlusWorkflow``) trusts the clients: one empty key, one bad ciphertext or one bad share ends
its round. Here, at every exchange, an answer that is missing, late or wrong costs the client that
sent it, and only that client:

    setup           keys are checked; equal keys of two clients cost both
    share keys      a client that does not serve every neighbour is out
    check shares    if a client cannot read another's shares, the two are no longer neighbours;
                    a client with too few neighbours left is out
    vectors         the lost ones' masks are taken off with the shares of their keys
    unmask          shares are checked one by one, and the secrets that they combine to
    pairwise seeds  only if a client's secret cannot be combined: the others give away the masks
                    that they share with it, and its vector is left out

Nobody can check a masked vector itself: noise spoils the sum, and shows only when the sum turns out
not to be a sum of vectors. spoilers.py then finds the client over the next rounds.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from fedhet.common.flower.secagg import (
    Key,
    Stage,
    bytes_to_private_key,
    bytes_to_public_key,
    combine_shares,
    dequantize,
    generate_shared_key,
    pseudo_rand_gen,
    public_key_to_bytes,
)
from fedhet.strategies.modes.secure import shares as shares
from fedhet.strategies.modes.secure.exchanges import SecAggWire
from fedhet.strategies.modes.secure.reply_vector import Vector

LEAST = 3  # from a sum of two, each client knows the other's part
_LONGEST = 4096  # bytes of an encrypted pair of shares; Flower's has about 600
Masked = NDArray[np.uint32]


class NoSumError(Exception):
    """A round without a sum; the message says why."""


class SpoiltSumError(NoSumError):
    """What ``summed`` nodes have sent adds up to something else than a sum of vectors."""

    def __init__(self, why: str, summed: Collection[int]) -> None:
        super().__init__(why)
        self.summed = summed


@dataclass
class SecureSum:
    """One secure sum of the nodes' vectors."""

    wire: SecAggWire  # to the nodes
    setup: ConfigRecord  # Flower's settings, which every client gets
    length: int  # of the vectors
    # by node, the nodes that share its secrets, itself included
    neighbours: dict[int, set[int]] = field(default_factory=dict)
    keys: dict[int, list[bytes]] = field(default_factory=dict)  # by node, its two public keys
    # by node, the hashes of its shares by holder
    hashes: dict[int, dict[int, bytes]] = field(default_factory=dict)
    # by node, the hash of its own mask's seed
    seed_hashes: dict[int, bytes] = field(default_factory=dict)

    @property
    def threshold(self) -> int:
        """The number of shares that give a secret."""
        return int(str(self.setup[Key.THRESHOLD]))

    def run(self, contents: Mapping[int, RecordDict]) -> tuple[Vector, set[int]]:
        """Return the mean of the nodes' vectors, and the nodes that are in it.

        ``contents`` are those of the messages that ask the nodes to train.

        Raises:
            NoSumError: if too few clients are left.
        """
        self.neighbours = _ring(contents, int(str(self.setup[Key.SHARE_NUMBER])))
        self._exchange_keys()
        received = self._share_keys()
        self._check_shares(received)
        vectors = self._collect(contents)
        secrets, failed = self._secrets(vectors)
        return self._unmasked(vectors, secrets, failed), set(vectors) - failed

    # ---- the exchanges ---------------------------------------------------------------------------

    def _exchange_keys(self) -> None:
        def read(node: int, answer: ConfigRecord) -> list[bytes]:
            keys = (answer[name] for name in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2))
            return [shares.check_public_key(key) for key in keys]

        asked = dict.fromkeys(self.neighbours, self.setup)
        self.keys = self.wire.ask(Stage.SETUP, asked, read)
        owners: dict[bytes, list[int]] = {}
        for node, keys in self.keys.items():
            for key in keys:
                owners.setdefault(key, []).append(node)
        for nodes in owners.values():
            for node in nodes if len(nodes) > 1 else []:
                self.wire.lost[node] = "its public key is not its own alone"
        self._settle(Stage.SETUP)

    def _share_keys(self) -> dict[int, dict[int, bytes]]:
        """Return the encrypted shares by receiver and sender."""

        def read(node: int, answer: ConfigRecord) -> dict[int, bytes]:
            others = self.neighbours[node] - {node}
            nodes = _integers(answer[Key.DESTINATION_LIST])
            sent = _byte_strings(answer[Key.CIPHERTEXT_LIST])
            if len(nodes) != len(sent) or sorted(nodes) != sorted(others):
                raise ValueError("its shares are not for the clients that it shares with")
            if any(not 0 < len(one) <= _LONGEST for one in sent):
                raise ValueError(f"its shares have not between 1 and {_LONGEST} bytes")
            seed_hash = answer[shares.SEED_HASH]
            hashes = shares.check_hashes(answer[shares.SHARE_HASHES], seed_hash, len(nodes) + 1)
            self.hashes[node] = dict(zip([*nodes, node], hashes, strict=True))
            self.seed_hashes[node] = cast(bytes, seed_hash)
            return dict(zip(nodes, sent, strict=True))

        asked = {
            node: ConfigRecord({str(other): self.keys[other] for other in self.neighbours[node]})
            for node in self.neighbours
        }
        sent = self.wire.ask(Stage.SHARE_KEYS, asked, read)
        self._settle(Stage.SHARE_KEYS)
        return {
            node: {other: sent[other][node] for other in sorted(others - {node})}
            for node, others in self.neighbours.items()
        }

    def _check_shares(self, received: Mapping[int, Mapping[int, bytes]]) -> None:
        def read(node: int, answer: ConfigRecord) -> list[int]:
            nodes = _integers(answer[shares.UNREADABLE])
            if not set(nodes) <= received[node].keys():
                raise ValueError("it names clients that it has no shares of")
            return nodes

        asked = {
            node: ConfigRecord(
                {
                    Key.SOURCE_LIST: list(sent),
                    Key.CIPHERTEXT_LIST: list(sent.values()),
                    shares.SHARE_HASHES: [self.hashes[other][node] for other in sent],
                }
            )
            for node, sent in received.items()
        }
        unreadable = self.wire.ask(shares.CHECK_SHARES, asked, read)
        for node, others in unreadable.items():
            for other in others:
                self.neighbours[node].discard(other)
                self.neighbours[other].discard(node)
        self._settle(shares.CHECK_SHARES)

    def _collect(self, contents: Mapping[int, RecordDict]) -> dict[int, Masked]:
        def read(node: int, answer: ConfigRecord) -> Masked:
            data = answer[Key.MASKED_PARAMETERS]
            size = 1 + self.length
            if not isinstance(data, bytes) or len(data) != 4 * size:
                raise ValueError(f"it is not a vector of {size} numbers of 32 bits")
            return np.frombuffer(data, "<u4").astype(np.uint32)

        asked = {
            node: ConfigRecord({Key.SOURCE_LIST: sorted(others - {node})})
            for node, others in self.neighbours.items()
        }
        stage = Stage.COLLECT_MASKED_VECTORS
        vectors = self.wire.ask(stage, asked, read, contents)
        if len(vectors) < LEAST:
            raise NoSumError(self._too_few(stage, len(vectors)))
        self._require(stage, vectors)
        return vectors

    def _secrets(self, vectors: Collection[int]) -> tuple[dict[int, bytes], set[int]]:
        """Return the secrets by node, and the nodes whose shares do not give theirs.

        For a node with a vector it is the seed of its own mask, else its first private key.
        """

        def read(node: int, answer: ConfigRecord) -> dict[int, bytes]:
            nodes = _integers(answer[Key.NODE_ID_LIST])
            sent = dict(zip(nodes, _byte_strings(answer[Key.SHARE_LIST]), strict=True))
            if len(nodes) != len(sent) or sent.keys() != self.neighbours[node]:
                raise ValueError("its shares are not those that it was asked for")
            for owner, share in sent.items():
                hashes = self.hashes[owner][node]
                if not shares.is_share(share, hashes, of_seed=owner in vectors):
                    raise ValueError("a share is not the one that it was given")
            return sent

        asked = {
            node: ConfigRecord(
                {
                    Key.ACTIVE_NODE_ID_LIST: sorted(self.neighbours[node] & set(vectors)),
                    Key.DEAD_NODE_ID_LIST: sorted(self.neighbours[node] - set(vectors)),
                }
            )
            for node in vectors
        }
        held = self.wire.ask(Stage.UNMASK, asked, read)
        self._require(Stage.UNMASK, held)
        secrets: dict[int, bytes] = {}
        for owner, holders in self.neighbours.items():
            own = [held[node][owner] for node in sorted(holders & held.keys())]
            try:
                secret = combine_shares(own[: self.threshold])
                if self._is_secret(owner, secret, of_seed=owner in vectors):
                    secrets[owner] = secret
            except Exception:  # the owner has made the shares, of anything
                continue
        return secrets, self.neighbours.keys() - secrets.keys()

    def _is_secret(self, owner: int, secret: bytes, *, of_seed: bool) -> bool:
        if of_seed:
            return shares.fits_seed(secret, self.seed_hashes[owner])
        return public_key_to_bytes(bytes_to_private_key(secret).public_key()) == self.keys[owner][0]

    def _pairwise_seeds(
        self, nodes: Collection[int], failed: Collection[int]
    ) -> dict[int, dict[int, bytes]]:
        """Return, by node and failed node, the seed of the mask that the two share."""
        common = {node: sorted(self.neighbours[node] & set(failed)) for node in nodes}

        def read(node: int, answer: ConfigRecord) -> dict[int, bytes]:
            seeds = map(shares.check_pairwise_seed, _byte_strings(answer[shares.SEEDS]))
            return dict(zip(common[node], seeds, strict=True))

        asked = {
            node: ConfigRecord({Key.DEAD_NODE_ID_LIST: others})
            for node, others in common.items()
            if others
        }
        found = self.wire.ask(shares.PAIRWISE_SEEDS, asked, read)
        if missing := sorted(asked.keys() - found.keys()):
            raise NoSumError(f"the masks that nodes {missing} share with a lost client are missing")
        return found

    # ---- the sum ---------------------------------------------------------------------------------

    def _unmasked(
        self, vectors: Mapping[int, Masked], secrets: Mapping[int, bytes], failed: set[int]
    ) -> Vector:
        """Return the mean of the vectors of the nodes that have not failed."""
        summed = sorted(vectors.keys() - failed)
        if len(summed) < max(self.threshold, LEAST):
            raise NoSumError(f"the shares of {len(failed)} clients do not give their secrets")
        for node in failed:
            self.wire.lost[node] = "the shares of its secret do not give the secret"
        revealed = self._pairwise_seeds(summed, failed) if failed else {}
        total = np.zeros(1 + self.length, np.uint32)
        for node in summed:
            total += vectors[node] - self._mask(secrets[node])
        for gone in self.neighbours.keys() - set(summed):
            for node in sorted(self.neighbours[gone] & set(summed)):
                if gone in failed:
                    seed = revealed[node][gone]
                else:
                    seed = generate_shared_key(
                        bytes_to_private_key(secrets[gone]), bytes_to_public_key(self.keys[node][0])
                    )
                mask = self._mask(seed)
                total += mask if gone > node else -mask
        return self._mean(total, summed)

    def _mask(self, seed: bytes) -> Masked:
        """Return the mask of a seed, as the clients draw it."""
        drawn = pseudo_rand_gen(seed, int(str(self.setup[Key.MOD_RANGE])), [(1,), (self.length,)])
        return np.concatenate(drawn).astype(np.uint32)

    def _mean(self, total: Masked, summed: Sequence[int]) -> Vector:
        count = len(summed)
        steps = int(str(self.setup[Key.TARGET_RANGE]))
        clip = float(str(self.setup[Key.CLIPPING_RANGE]))
        if int(total[0]) != count * steps:
            why = "this is not the sum of clients' vectors; one of them sent something else"
            raise SpoiltSumError(why, summed)
        (mean,) = dequantize([total[1:].astype(np.int64)], clip, steps)
        mean -= (count - 1) * clip
        mean *= steps / int(total[0])
        return mean

    # ---- who is left -----------------------------------------------------------------------------

    def _settle(self, stage: str) -> None:
        """Leave out the lost clients, and those whose secrets too few others would share.

        None of them has put a mask into any vector yet.
        """
        for node in self.wire.lost.keys() & self.neighbours.keys():
            self._leave_out(node)
        left = len(self.neighbours)
        while len(self.neighbours) >= LEAST:
            node = min(sorted(self.neighbours), key=lambda one: len(self.neighbours[one]))
            sharing = len(self.neighbours[node])
            if sharing >= self.threshold:
                return
            self.wire.lost[node] = (
                f"after {stage!r} {sharing} clients could share its secrets, and it needs "
                f"{self.threshold}, itself included"
            )
            self._leave_out(node)
        raise NoSumError(self._too_few(stage, left))

    def _leave_out(self, node: int) -> None:
        for other in self.neighbours.pop(node) - {node}:
            self.neighbours[other].discard(node)

    def _require(self, stage: str, left: Collection[int]) -> None:
        """Raise NoSumError if some client's secret cannot be combined."""
        if any(len(nodes & set(left)) < self.threshold for nodes in self.neighbours.values()):
            raise NoSumError(self._too_few(stage, len(left)))

    def _too_few(self, stage: str, left: int) -> str:
        return (
            f"after {stage.replace('_', ' ')!r} {left} clients were left: a sum needs {LEAST}, "
            f"and each needs {self.threshold} of the clients it shares with, itself included "
            "(strategy.secure_aggregation.reconstruction_threshold)"
        )


def _ring(nodes: Iterable[int], num_shares: int) -> dict[int, set[int]]:
    """Return the neighbours of each node on a random ring, itself included."""
    order = sorted(nodes)
    random.SystemRandom().shuffle(order)
    half = num_shares // 2
    return {
        node: {order[(at + offset) % len(order)] for offset in range(-half, half + 1)}
        for at, node in enumerate(order)
    }


def _integers(value: object) -> list[int]:
    if not isinstance(value, list) or any(type(one) is not int for one in value):
        raise ValueError("it is not a list of node ids")
    return value


def _byte_strings(value: object) -> list[bytes]:
    if not isinstance(value, list) or any(not isinstance(one, bytes) for one in value):
        raise ValueError("it is not a list of bytes")
    return value

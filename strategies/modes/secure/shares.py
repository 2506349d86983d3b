"""Checks of SecAgg+'s keys and shares, so that a bad one costs its sender and not the round.

Flower's protocol notices a bad key or share late or not at all, and then nobody has a sum. Here

- the server accepts only fresh P-384 public keys;
- every client sends, with its encrypted shares, their hashes, and the hash of its mask's seed. The
  clients that hold the shares compare them with the hashes before they train ("check shares");
- the server compares the hashes with the shares that it gets at the end, and with their seed;
- if a client's shares do not give its secret, the others tell the server the seeds of the masks
  that they share with it ("pairwise seeds"), and the sum is the others'.

Shares look random below the threshold, so their hashes do not reveal the secrets.
"""

from __future__ import annotations

from hashlib import sha256
from typing import cast

from flwr.app import ConfigRecord, Context

from fedhet.common.flower.secagg import (
    RECORD_KEY_STATE,
    Key,
    SecAggPlusState,
    Stage,
    bytes_to_private_key,
    bytes_to_public_key,
    decrypt,
    generate_shared_key,
    public_key_to_bytes,
    share_keys_plaintext_separate,
)
from fedhet.strategies.base import RefusedReplyError

# Stages and keys of messages beside Flower's own.
CHECK_SHARES, PAIRWISE_SEEDS = "check shares", "pairwise seeds"
SHARE_HASHES, SEED_HASH = "share-hashes", "seed-hash"
UNREADABLE, SEEDS = "unreadable", "seeds"
_CIPHERTEXTS = "secagg-ciphertexts"  # in the client's context, from the check until it trains
_HASH, _SEED, _PAIRWISE_SEED = 32, 32, 44  # bytes
_CURVE = "secp384r1"


def check_public_key(key: object) -> bytes:
    """Return a public key as Flower writes it; raise ValueError for anything else."""
    if not isinstance(key, bytes) or not key:
        raise ValueError("its public key is empty or not of bytes")
    loaded = bytes_to_public_key(key)
    if getattr(getattr(loaded, "curve", None), "name", "") != _CURVE:
        raise ValueError("its public key is not of the curve P-384")
    if public_key_to_bytes(loaded) != key:  # so that the same key has the same bytes
        raise ValueError("its public key is not written as Flower writes it")
    return key


def share_hashes(seed_share: bytes, key_share: bytes) -> bytes:
    """Return the hashes of the two shares that a client holds for another one (64 bytes)."""
    return sha256(seed_share).digest() + sha256(key_share).digest()


def is_share(share: bytes, hashes: bytes, *, of_seed: bool) -> bool:
    """Return whether a share is the one that was hashed by :func:`share_hashes`."""
    expected = hashes[:_HASH] if of_seed else hashes[_HASH:]
    return sha256(share).digest() == expected


def fits_seed(seed: bytes, expected: bytes) -> bool:
    """Return whether this is the seed whose hash a client has sent."""
    return len(seed) == _SEED and sha256(seed).digest() == expected


def check_pairwise_seed(seed: bytes) -> bytes:
    """Return the seed of a mask that two clients share; raise ValueError if it is invalid."""
    if len(seed) != _PAIRWISE_SEED:
        raise ValueError("it has sent no seed of a mask")
    return seed


def check_hashes(hashes: object, seed_hash: object, holders: int) -> list[bytes]:
    """Return a client's hashes by holder; raise ValueError if they are invalid."""
    if not isinstance(hashes, list) or len(hashes) != holders:
        raise ValueError(f"it has sent no {holders} hashes of shares")
    if not isinstance(seed_hash, bytes) or len(seed_hash) != _HASH:
        raise ValueError("it has sent no hash of its mask's seed")
    if any(not isinstance(one, bytes) or len(one) != 2 * _HASH for one in hashes):
        raise ValueError("its hashes of shares are not of 64 bytes")
    return cast(list[bytes], hashes)


# ---- at the client -------------------------------------------------------------------------------


def add_hashes(answer: ConfigRecord, context: Context) -> None:
    """Add the hashes to a client's answer with its encrypted shares; its own shares come last."""
    state = _state(context)
    own = state.rd_seed_share_dict[state.nid], state.sk1_share_dict[state.nid]
    nodes = cast(list[int], answer[Key.DESTINATION_LIST])
    ciphertexts = cast(list[bytes], answer[Key.CIPHERTEXT_LIST])
    shares = [
        share_keys_plaintext_separate(decrypt(state.ss2_dict[node], ciphertext))[2:]
        for node, ciphertext in zip(nodes, ciphertexts, strict=True)
    ]
    answer[SHARE_HASHES] = [share_hashes(*pair) for pair in [*shares, own]]
    answer[SEED_HASH] = sha256(state.rd_seed).digest()


def check_shares(configs: ConfigRecord, context: Context) -> ConfigRecord:
    """Answer which clients' shares cannot be read; keep the ciphertexts for the training."""
    state = _state(context)
    nodes = cast(list[int], configs[Key.SOURCE_LIST])
    ciphertexts = cast(list[bytes], configs[Key.CIPHERTEXT_LIST])
    hashes = cast(list[bytes], configs[SHARE_HASHES])
    received = list(zip(nodes, ciphertexts, hashes, strict=True))
    context.state.config_records[_CIPHERTEXTS] = ConfigRecord(
        {str(node): ciphertext for node, ciphertext, _ in received}
    )
    return ConfigRecord(
        {UNREADABLE: [node for node, *sent in received if not _holds(state, node, *sent)]}
    )


def _holds(state: SecAggPlusState, node: int, ciphertext: bytes, hashes: bytes) -> bool:
    """Return whether a ciphertext holds the two shares of a node that it has hashed."""
    try:
        plaintext = decrypt(state.ss2_dict[node], ciphertext)
        source, destination, *shares = share_keys_plaintext_separate(plaintext)
    except Exception:  # whatever another client has sent
        return False
    own = state.rd_seed_share_dict[state.nid], state.sk1_share_dict[state.nid]
    lengths = [len(share) for share in shares] == [len(share) for share in own]
    return (
        (source, destination) == (node, state.nid) and lengths and share_hashes(*shares) == hashes
    )


def take_ciphertexts(configs: ConfigRecord, context: Context) -> None:
    """Add the kept ciphertexts to the server's message that asks for the masked vector."""
    kept = context.state.config_records.pop(_CIPHERTEXTS)
    nodes = cast(list[int], configs[Key.SOURCE_LIST])
    configs[Key.CIPHERTEXT_LIST] = [cast(bytes, kept[str(node)]) for node in nodes]


def reveal_seeds(configs: ConfigRecord, context: Context) -> ConfigRecord:
    """Answer the seeds of the masks that this client shares with some others, once a round.

    Raises:
        RefusedReplyError: at another time, or if the server asks for so many seeds that fewer
            clients than the threshold would still hide this one's numbers.
    """
    state = _state(context)
    nodes = cast(list[int], configs[Key.DEAD_NODE_ID_LIST])
    most = len(state.public_keys_dict) - state.threshold
    if state.current_stage != Stage.UNMASK or not state.sk1 or len(nodes) > most:
        raise RefusedReplyError(
            f"the server may not know the masks shared with {len(nodes)} others"
        )
    key = bytes_to_private_key(state.sk1)
    seeds = [
        generate_shared_key(key, bytes_to_public_key(state.public_keys_dict[node][0]))
        for node in nodes
    ]
    state.sk1 = b""
    context.state.config_records[RECORD_KEY_STATE] = ConfigRecord(state.to_dict())
    return ConfigRecord({SEEDS: seeds})


def _state(context: Context) -> SecAggPlusState:
    return SecAggPlusState(**context.state.config_records[RECORD_KEY_STATE])

"""One of five clients attacks a secure round: it alone pays, it is named, and the sum is exact."""

import logging
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from itertools import count

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod.secure_aggregation.secaggplus_mod import SecAggPlusState
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)
from flwr.supercore.primitives.asymmetric import (
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)

from fedhet.strategies.base import RefusedReplyError
from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.modes.secure.aggregation import SecAggPlus
from fedhet.strategies.modes.secure.shares import (
    CHECK_SHARES,
    SEED_HASH,
    SEEDS,
    SHARE_HASHES,
    UNREADABLE,
    reveal_seeds,
)
from fedhet.strategies.modes.secure.spoilers import SpoilerSearch
from fedhet.strategies.modes.secure.workflow import LEAST
from fedhet.strategies.round.registration import FederationConfig
from tests.refused import refused
from tests.strategies.labelled import assert_same, blobs, train
from tests.strategies.modes.secure.test_secure_aggregation import VECTORS, answered, losing
from tests.strategies.sides import built

BAD, ALL, HONEST = 2, [0, 1, 2, 3, 4], [0, 1, 3, 4]
SECURE = SecAggPlus(max_examples=50)
P256 = public_key_to_bytes(ec.generate_private_key(ec.SECP256R1()).public_key())
DATA = blobs(5)

Change = Callable[[ConfigRecord], object]


def attacking(stage: str, change: Change, client: int = BAD):
    """Return a tamper that changes a client's answer in one exchange."""

    def tamper(message: Message) -> Message:
        if message.metadata.src_node_id == 1000 + client and answered(message) == stage:
            configs = ConfigRecord({**message.content[RECORD_KEY_CONFIGS]})
            change(configs)
            message.content = RecordDict({RECORD_KEY_CONFIGS: configs})
        return message

    return tamper


def setting(key: str, value: object | Callable) -> Change:
    """Return a change of one value, or by a function of it."""

    def change(configs: ConfigRecord) -> None:
        configs[key] = value(configs[key]) if callable(value) else value

    return change


def swapped(configs: ConfigRecord) -> None:
    configs[Key.PUBLIC_KEY_2] = configs[Key.PUBLIC_KEY_1]


def flipped(one: bytes) -> bytes:
    return one[:8] + bytes([one[8] ^ 1]) + one[9:]


def each(change: Callable) -> Callable:
    return lambda values: [change(value) for value in values]


def first(change: Callable) -> Callable:
    return lambda values: [change(values[0]), *values[1:]]


@lru_cache
def without_attack(*lost: tuple[int, str]):
    strategy = built(FedAvg, local_lr=0.1, secure_aggregation=SECURE)
    found, _ = train(strategy, rounds=1, data=DATA, tamper=losing(*lost))
    return found


SETUP, SHARES, CHECK, UNMASK = Stage.SETUP, Stage.SHARE_KEYS, CHECK_SHARES, Stage.UNMASK
CIPHERTEXTS, MASKED = Key.CIPHERTEXT_LIST, Key.MASKED_PARAMETERS
UNREAD = "'check shares' 1 clients could share"
COSTS_IT_THE_ROUND = [
    (SETUP, setting(Key.PUBLIC_KEY_1, b""), "public key is empty"),
    (SETUP, setting(Key.PUBLIC_KEY_2, b""), "public key is empty"),
    (SETUP, setting(Key.PUBLIC_KEY_1, 7), "public key is empty or not of bytes"),
    (SETUP, setting(Key.PUBLIC_KEY_2, [b"x"]), "public key is empty or not of bytes"),
    (SETUP, setting(Key.PUBLIC_KEY_1, b"\x00\xff"), "'setup' cannot be read"),
    (SETUP, setting(Key.PUBLIC_KEY_1, b"-----BEGIN PUBLIC KEY-----"), "'setup' cannot be read"),
    (SETUP, setting(Key.PUBLIC_KEY_2, P256), "not of the curve P-384"),
    (SETUP, setting(Key.PUBLIC_KEY_2, lambda key: key + b"\n"), "not written as Flower"),
    (SETUP, swapped, "not its own alone"),
    (SETUP, lambda configs: configs.pop(Key.PUBLIC_KEY_2), "'setup' cannot be read"),
    (SHARES, setting(CIPHERTEXTS, each(lambda _: b"nothing")), UNREAD),
    (SHARES, setting(CIPHERTEXTS, each(flipped)), UNREAD),
    (SHARES, setting(CIPHERTEXTS, lambda sent: sent[::-1]), UNREAD),
    (SHARES, setting(CIPHERTEXTS, each(lambda _: b"")), "not between 1 and"),
    (SHARES, setting(CIPHERTEXTS, each(lambda _: bytes(1 << 20))), "not between 1 and"),
    (SHARES, setting(CIPHERTEXTS, []), "not for the clients"),
    (SHARES, setting(CIPHERTEXTS, b"one"), "list of bytes"),
    (SHARES, setting(CIPHERTEXTS, each(str)), "list of bytes"),
    (SHARES, setting(Key.DESTINATION_LIST, each(lambda _: 1000)), "not for the clients"),
    (SHARES, setting(Key.DESTINATION_LIST, each(lambda node: node + 9)), "not for the clients"),
    (SHARES, setting(Key.DESTINATION_LIST, each(float)), "list of node ids"),
    (SHARES, setting(SHARE_HASHES, each(flipped)), UNREAD),
    (SHARES, setting(SHARE_HASHES, []), "no 5 hashes"),
    (SHARES, setting(SHARE_HASHES, each(lambda one: one[:-1])), "not of 64 bytes"),
    (SHARES, setting(SEED_HASH, b""), "no hash of its mask's seed"),
    (SHARES, setting(SEED_HASH, flipped), "do not give the secret"),
    (SHARES, lambda configs: configs.pop(SHARE_HASHES), "'share_keys' cannot be read"),
    (CHECK, setting(UNREADABLE, [1000, 1001, 1003, 1004]), UNREAD),
    (CHECK, setting(UNREADABLE, [5]), "it has no shares of"),
    (CHECK, setting(UNREADABLE, [1002]), "it has no shares of"),
    (CHECK, setting(UNREADABLE, ["1000"]), "list of node ids"),
    (CHECK, setting(UNREADABLE, b"all"), "list of node ids"),
    (VECTORS, setting(MASKED, b""), "vector of"),
    (VECTORS, setting(MASKED, lambda data: data[:-1]), "vector of"),
    (VECTORS, setting(MASKED, lambda data: b"PK\x03\x04" + data), "vector of"),
    (VECTORS, setting(MASKED, lambda data: [data]), "vector of"),
    (VECTORS, setting(MASKED, 1e300), "vector of"),
]
TOO_LATE = [
    (setting(Key.SHARE_LIST, each(flipped)), "not the one that it was given"),
    (setting(Key.SHARE_LIST, first(flipped)), "not the one that it was given"),
    (setting(Key.SHARE_LIST, each(lambda _: b"")), "not the one that it was given"),
    (setting(Key.SHARE_LIST, lambda sent: sent[::-1]), "not the one that it was given"),
    (setting(Key.SHARE_LIST, []), "cannot be read"),
    (setting(Key.SHARE_LIST, 3.0), "list of bytes"),
    (setting(Key.NODE_ID_LIST, each(lambda _: 1000)), "not those that it was asked for"),
    (setting(Key.NODE_ID_LIST, lambda nodes: nodes[::-1]), "not the one that it was given"),
    (lambda configs: configs.pop(Key.NODE_ID_LIST), "cannot be read"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "change", "reason"), COSTS_IT_THE_ROUND)
def test_it_costs_the_attacker_the_round(stage, change, reason):
    """To the bit, the others' sum is what it is without the attacker."""
    strategy = built(FedAvg, local_lr=0.1, secure_aggregation=SECURE)
    found, [*_, report] = train(strategy, 1, data=DATA, tamper=attacking(stage, change))
    assert list(report.clients) == HONEST
    (failure,) = report.failures
    assert failure.startswith(f"client {BAD}: ")
    assert reason in failure
    assert_same(found, without_attack((BAD, SETUP)))


@pytest.mark.slow
@pytest.mark.parametrize(("change", "reason"), TOO_LATE)
def test_a_bad_share_at_the_end_changes_nothing_and_is_named(change, reason):
    """Its vector is in the sum already."""
    strategy = built(FedAvg, local_lr=0.1, secure_aggregation=SECURE)
    found, [*_, report] = train(strategy, 1, data=DATA, tamper=attacking(UNMASK, change))
    assert list(report.clients) == ALL
    (failure,) = report.failures
    assert failure.startswith(f"client {BAD}, after its update was summed: ")
    assert reason in failure
    assert_same(found, without_attack())


@pytest.mark.slow
@pytest.mark.parametrize(
    "tamper",
    [
        attacking(SHARES, setting(CIPHERTEXTS, first(flipped))),
        attacking(CHECK, setting(UNREADABLE, [1000])),
    ],
)
def test_two_clients_that_disagree_are_no_neighbours_and_nobody_is_lost(tamper):
    """Nobody can tell which of the two lies, and nobody has to."""
    strategy = built(FedAvg, local_lr=0.1, secure_aggregation=SECURE)
    found, [*_, report] = train(strategy, 1, data=DATA, tamper=tamper)
    assert list(report.clients) == ALL
    assert report.failures == []
    assert_same(found, without_attack())


ODD_SEED = b"y" * 45  # as long as 32 bytes when padded, and no seed of a mask


@pytest.fixture(params=["seed", "odd seed", "key"])
def bad_shares(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the attacker share noise in place of its mask's seed or its private key."""
    mod = sys.modules["flwr.client.mod.secure_aggregation.secaggplus_mod"]
    calls, create = count(), mod.create_shares
    bad = 2 * BAD + (request.param == "key")  # clients are asked in order, for two secrets each

    def create_shares(secret: bytes, threshold: int, num: int) -> list[bytes]:
        attacks = next(calls) == bad
        if attacks and request.param == "odd seed":
            return create(ODD_SEED, threshold, num)
        made = create(secret, threshold, num)
        if attacks:
            return [share[:4] + os.urandom(len(share) - 4) for share in made]
        return made

    monkeypatch.setattr(mod, "create_shares", create_shares)
    return request.param


@pytest.mark.slow
def test_shares_of_noise_cost_the_attacker_the_round(bad_shares):
    """Nobody notices before the end. Without its private key, it vanishes before it has to send."""
    odd = sha256(ODD_SEED).digest()
    tamper = {
        "seed": losing(),
        "odd seed": attacking(SHARES, setting(SEED_HASH, odd)),
        "key": losing((BAD, VECTORS)),
    }[bad_shares]
    strategy = built(FedAvg, local_lr=0.1, secure_aggregation=SECURE)
    found, [*_, report] = train(strategy, 1, data=DATA, tamper=tamper)
    assert list(report.clients) == HONEST
    (failure,) = report.failures
    assert failure.startswith(f"client {BAD}: ")
    assert "the shares of its secret do not give the secret" in failure
    assert_same(found, without_attack((BAD, SETUP)))


@pytest.mark.slow
@pytest.mark.parametrize("change", [setting(SEEDS, []), setting(SEEDS, [b"1"])])
def test_a_second_attacker_that_hides_its_seeds_costs_the_round_and_no_more(change):
    strategy = built(FedAvg, local_lr=0.1, secure_aggregation=SECURE)
    broken = attacking(SHARES, setting(SEED_HASH, flipped))

    def tamper(message: Message) -> Message:
        message = broken(message)
        seeds = message.has_content() and SEEDS in message.content.get(RECORD_KEY_CONFIGS, {})
        if seeds and message.metadata.src_node_id == 1004:
            configs = ConfigRecord({**message.content[RECORD_KEY_CONFIGS]})
            change(configs)
            message.content = RecordDict({RECORD_KEY_CONFIGS: configs})
        return message

    _, [*_, report] = train(strategy, 1, data=DATA, tamper=tamper)
    assert list(report.clients) == []
    assert len(report.failures) == 5
    (named,) = (failure for failure in report.failures if failure.startswith("client 4: "))
    assert "'pairwise seeds' cannot be read" in named


def test_a_client_tells_the_seeds_of_few_masks_and_once_a_round():
    """Of five with threshold 3 it tells two: two other clients still hide its numbers."""
    pairs = [generate_key_pairs() for _ in range(5)]
    state = SecAggPlusState(threshold=3, sk1=private_key_to_bytes(pairs[0][0]))
    state.public_keys_dict = {
        n: (public_key_to_bytes(own),) * 2 for n, (_, own) in enumerate(pairs)
    }
    records = RecordDict({RECORD_KEY_STATE: ConfigRecord(state.to_dict())})
    context = Context(run_id=1, node_id=1, node_config={}, state=records, run_config={})
    two, three = (ConfigRecord({Key.DEAD_NODE_ID_LIST: [*range(1, n)]}) for n in (3, 4))
    with refused("3 others", kind=RefusedReplyError):
        reveal_seeds(three, context)
    assert len(set(reveal_seeds(two, context)[SEEDS])) == 2
    with refused("2 others", kind=RefusedReplyError):
        reveal_seeds(two, context)


def noise(*clients: int):
    """Return a tamper with which clients send a masked vector of noise, in every round."""
    changes = [
        attacking(VECTORS, setting(MASKED, lambda data: os.urandom(len(data))), one)
        for one in clients
    ]

    def tamper(message: Message) -> Message:
        for change in changes:
            message = change(message)
        return message

    return tamper


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "size"), [((2,), 5), ((7,), 8), ((1, 4), 9)])
def test_clients_that_send_noise_are_found_over_the_rounds_and_left_out(bad, size, caplog):
    """More rounds fail in a row than max_failed_rounds allows, while the search gets on."""
    strategy = built(
        FedAvg,
        local_lr=0.1,
        secure_aggregation=SecAggPlus(max_examples=100),
        federation=FederationConfig(max_failed_rounds=1),
    )
    with caplog.at_level(logging.WARNING, "flwr"):
        _, reports = train(strategy, 12, data=blobs(size), tamper=noise(*bad))
    search = SpoilerSearch.of(strategy.state.spoilers)
    assert (search.suspects, sorted(search.found)) == ((), list(bad))
    assert [len(report.clients) for report in reports[-2:]] == [size - len(bad)] * 2
    assert [list(report.absent) for report in reports[-2:]] == [list(bad)] * 2
    assert sum(bool(report.clients) for report in reports[1:]) >= 4
    assert all(f"client {one} spoils the secure sums" in caplog.text for one in bad)


@pytest.mark.slow
def test_without_enough_others_or_without_a_search_such_rounds_end_the_run():
    for size, secure in ((3, SECURE), (5, SecAggPlus(max_examples=50, find_spoilers=False))):
        strategy = built(FedAvg, local_lr=0.1, secure_aggregation=secure)
        with refused("max_failed_rounds=3", kind=RuntimeError):
            train(strategy, 9, data=blobs(size), tamper=noise(1))
        assert not strategy.state.spoilers.get("found")


@pytest.mark.parametrize("size", [4, 5, 6, 9, 10, 40])
@pytest.mark.parametrize("how_many", [1, 2, 3])
def test_the_search_never_leaves_an_innocent_client_out(size, how_many):
    """Whatever clients spoil every sum. Some of few may go unfound: no sum is without them."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        bad = set(rng.choice(size, how_many, replace=False).tolist())
        search, steps = SpoilerSearch(), 0
        while steps < 40:
            out = search.left_out(size, LEAST)
            inside = [client for client in range(size) if client not in out]
            assert len(inside) >= LEAST
            spoilt = bool(bad.intersection(inside))
            if not spoilt and not search.suspects:
                break
            search, steps = search.after(inside, spoilt=spoilt), steps + 1
            if len(search.suspects) == 1 and size - len(search.found) - 1 >= LEAST:
                search = search.closed()
            assert bad.issuperset(search.found)
        if size >= 9 or how_many == 1:
            assert bad == set(search.found)

"""`fedhet runtime=deployment`: stopped, resumed, with the bits of one machine.

docker/federation.yaml as processes on loopback addresses: TLS, node keys, three sites. What breaks
on the way, and strangers, are drills (tests/drills/test_deployment.py).
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedhet.common.results import read_rows
from fedhet.report.site_data import read_site_figures
from fedhet.strategies.wire.tensor_files import parameters_sha256
from tests.deployed import MARKS, RECIPE, SITES, Deployment
from tests.processes import Fork, finish, read_until, summary_of
from tests.recipes import run_recipe

pytestmark = MARKS
# Payloads both ways, statistics, state at the sites, scores of each site by its name.
WORDS = [*RECIPE, "strategy=[feddw,fedpvr]", "local.epochs=1", "partition.holdout=0.2"]
WORDS += ["evaluation.clients=true", "evaluation.per_client=true", "evaluation.confusion=true"]
SAME = ("parameters_sha256", "accuracy", "bytes_up", "bytes_down", "failures", "confusion")


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Deployment]:
    with Deployment(tmp_path / "federation") as deployment:
        yield deployment
    assert deployment.left() == []


def test_a_stopped_run_is_resumed_with_the_bits_of_one_machine(federation, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    superlink = federation.services["superlink"]
    words = [
        *WORDS,
        "runtime=deployment",
        f"runtime.address={federation.network.translated('127.0.0.1:8000', superlink)}",
        f"runtime.root_certificates={federation.folder / 'server' / 'keys' / 'ca.crt'}",
        f"runtime.server_results={there}",
        "runtime.fetch='cp -R {server}/. {here}'",
        f"results_dir={here}",
    ]

    launched = Fork(tmp_path, *words, "rounds=1000", "runtime.stop_on_interrupt=true")
    said = read_until(launched, "round   1/")
    launched.send_signal(signal.SIGINT)
    code, rest = finish(launched)
    assert code == 130, said + rest
    assert summary_of(here)["status"] == "stopped"
    done = [row["round"] for row in read_rows(here / "metrics.jsonl")]
    assert done == list(range(len(done)))

    rounds = max(len(done) + 2, 4)  # a checkpoint may be one round ahead
    code, said = finish(Fork(tmp_path, *words, f"rounds={rounds}", "resume=true"))
    assert code == 0, said + federation.said()
    assert f"round {done[-1]:3}/" not in said
    expected, found = run_recipe(tmp_path / "alone", *WORDS, f"rounds={rounds}"), summary_of(here)
    assert {key: found[key] for key in SAME} == {key: expected[key] for key in SAME}
    stored = load_file(here / "model.safetensors")
    assert parameters_sha256(stored) == expected["parameters_sha256"]
    [written] = there.iterdir()
    assert read_rows(here / "metrics.jsonl") == read_rows(written / "metrics.jsonl")
    names = [f"site {site}" for site in SITES]
    assert found["client_names"] == dict(zip("012", names, strict=True))
    figures = read_site_figures(here, read_rows(here / "metrics.jsonl"), found)
    assert [site.name for site in figures.sites] == names
    assert all(site.held_out for site in figures.sites)
    assert len(figures.shared["accuracy"]) == 3
    for site in SITES:  # FedPVR's control variates lie at their sites
        state = federation.folder / f"site-{site}" / "state" / "clients"
        assert list(state.glob(f"*/client-{site:05}/round-{rounds:06}.safetensors"))
        assert not list(state.glob(f"*/client-0000[!{site}]"))
    assert not (written / "client_state").exists()

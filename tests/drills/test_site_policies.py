"""A federation whose sites have policies: who takes part, and whose code runs there."""

import re
from pathlib import Path

from fedhet.common.results import read_rows
from tests.deployed import MARKS, RECIPE, ROOT, SITES, Deployment

pytestmark = MARKS


def test_sites_obey_their_policies_and_pin_the_code(tmp_path: Path):
    """Site 0 runs its own copy of the code, site 1 one bundle, and site 2 another task."""
    with Deployment(tmp_path / "federation", POLICY="/data/policy.yaml") as federation:
        files = [federation.folder / f"site-{site}" / "data" / "policy.yaml" for site in SITES]
        files[0].write_text(f"{{own_code: {ROOT}, functions: []}}")
        files[1].write_text(f"bundles: [{'0' * 64}]")
        files[2].write_text("{site: Basel, tasks: [mnist]}")

        def run(results: str, *words: str) -> tuple[list[dict], str]:
            done = federation.execute(
                "serverapp",
                *("python", "-m", "fedhet", *RECIPE, "runtime=deployment", "rounds=1"),
                *("runtime.address=127.0.0.1:8000", f"results_dir=/results/{results}", *words),
            )
            folder = federation.folder / "server" / "results" / results
            log = (folder / "log.txt").read_text()
            assert done.returncode == 0, done.stdout + log + federation.said()
            return read_rows(folder / "metrics.jsonl"), log

        patient = ["runtime.min_clients=1", "runtime.connect_timeout_seconds=60"]
        rows, log = run("first", *patient)
        assert rows[1]["clients"] == [0], log
        assert "the policy of Basel (client 2) forbids task=digits (tasks=[mnist])" in log
        [bundle] = set(re.findall(r"forbids the bundle ([0-9a-f]{64})", log))
        files[1].write_text(f"bundles: ['{bundle}']")
        files[2].write_text("{payloads: [], metrics: []}")
        rows, log = run("second")
        assert (rows[1]["clients"], rows[1]["failures"]) == ([0, 1, 2], []), log
    assert federation.left() == []

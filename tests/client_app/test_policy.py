"""A site's policy: what each rule refuses, what stays at the site, and how a run goes on."""

import json
import re
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedhet.client_app import policy as rules
from fedhet.client_app.app import app
from fedhet.client_app.errors import SiteError
from fedhet.client_app.policy import Policy, read_policy
from fedhet.client_app.site_policy import ENVIRONMENT, PolicyError, PolicySide, SitePolicy
from fedhet.common.configured import fields
from fedhet.common.decisions import ANSWERS, CONFUSION
from fedhet.common.results import read_rows
from fedhet.strategies.base import Reply
from fedhet.strategies.wire.records import COLUMNS, METRICS, UPDATE, to_record
from fedhet.tools import policy as command
from tests.compose import DOCKER
from tests.recipes import TINY, run_recipe
from tests.refused import refused

PAGE = (DOCKER.parent / "docs" / "policy.md").read_text()
KINDS = {"registration": "query", "training": "train", "evaluation": "evaluate"}
COUNTS = {"partition-id", "num-examples", "num-steps", "lr-sum"}
NOTHING = "{payloads: [], metrics: []}"


def page_rows() -> list[list[str]]:
    """Return the rows of the page's table of twelve policies."""
    _, table = PAGE.split("| policy | run | refused at | message |\n|---|---|---|---|\n")
    lines = table.partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def written(folder: Path, text: str) -> Path:
    path = folder / "policy.yaml"
    path.write_text(text)
    return path


def ask(words: list[str], kind: str = "query", config: dict | None = None, **node: str) -> Message:
    """Return client 1's reply to a message."""
    run_config = {"overrides": json.dumps(["clients=3", *words])}
    context = Context(1, 1, {"partition-id": 1, **node}, RecordDict(), run_config)
    content = RecordDict({"config": ConfigRecord(config)} if config else {})
    return app(Message(content, dst_node_id=1, message_type=kind, ttl=77.0), context)


@pytest.fixture(autouse=True)
def at_noon(monkeypatch):
    noon = SimpleNamespace(now=lambda: datetime(2026, 11, 28, 12))
    monkeypatch.setattr(rules, "datetime", noon)
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *args, **named: None)


# ---- the page's policies -------------------------------------------------------------------------


def test_the_page_has_twelve_policies_and_all_rules():
    assert len(page_rows()) == 12
    known = {name for name in fields(Policy) if name != "privacy"}
    assert [name for name in known if f"| `{name}`" not in PAGE] == []
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        Policy(**yaml.safe_load(block))


@pytest.mark.slow
@pytest.mark.parametrize("row", page_rows(), ids=lambda row: row[0].strip("`"))
def test_a_policy_refuses_a_run_as_the_page_says(row, tmp_path):
    text, run, when, message = row
    words = [word for part in re.findall(r"`([^`]*=[^`]*)`", run) for word in part.split()]
    path = written(tmp_path, text.strip("`"))
    with pytest.raises((PolicyError, SiteError)) as error:
        ask(words, KINDS[when], policy=str(path))
    assert re.sub(r"\b[0-9a-f]{16,}\b", "…", str(error.value)) == message


# ---- each rule -----------------------------------------------------------------------------------

CENTRAL = ["strategy/differential_privacy=central_fixed", "strategy/aggregator=uniform_mean"]
LOCAL = "strategy/differential_privacy=local"
SOFT = "strategy.soft_labels"
NOISED = [LOCAL, "rounds=1", "strategy=feddw"]
FIT = ["task=tabular", "task.data_options.fit=federated", "task.target=sick"]
FIT += ["task.data_options.numeric=[a]", "task.data_options.categorical=[]", "task.classes=[y,n]"]
REFUSED = [
    ("bundles: [ab]", ["runtime.simulation=false"], "query", "bundles=[ab]"),
    ("folders: [/data]", ["task=mnist", "+task.path=s3://x/y"], "query", "task.path folders"),
    ("folders: [/data]", ["+local.reuse_training=/x"], "query", "local.reuse_training folders"),
    ("folders: [/data]", ["task=mnist", "+task.path=/database"], "query", "task.path folders"),
    ("functions: []", ["task=own", "task.data=os:a", "task.model=os:b"], "query", "os:a os:b"),
    ("functions: [os:a]", ["task=own", "task.data=os:a", "task.model=os:b"], "query", "os:b"),
    ("functions: []", ["+task.path='${oc.env:HOME}'"], "query", "oc.env functions"),
    ("payloads: [c*]", ["strategy=fedproto"], "train", "prototype_sums payloads"),
    ("payloads: []", ["partition.holdout=0.1"], "query.calibrate", "calibrate payloads"),
    ("payloads: [calibrate]", [], "query.confusion", "confusion payloads"),
    ("payloads: []", FIT, "query.columns", "columns payloads"),
    ("privacy: {by: site}", ["strategy=fedavg"], "query", "privacy.by=site"),
    ("privacy: {by: site}", [LOCAL, f"{LOCAL[:8]}.differential_privacy.reproducible_noise=true"],
     "query", "reproducible_noise privacy.by"),
    ("privacy: {by: server}", [*CENTRAL, "strategy.differential_privacy.clipping=server"],
     "query", "clipping=server privacy.by"),
    ("privacy: {by: site, epsilon: 5}", [LOCAL, "rounds=100"], "query", "privacy.epsilon=5.0"),
    ("privacy: {by: site, epsilon: 5}",
     [LOCAL, "rounds=1", "strategy=fedbuff", "system=lognormal"], "query", "epsilon=inf"),
    ("privacy: {by: site, epsilon: 0.9}", [*NOISED, f"{SOFT}.noise_multiplier=5"],
     "query", "privacy.epsilon=0.9"),  # each alone would do: .76 and .74
    ("privacy: {by: site, epsilon: 5}", [*NOISED, f"{SOFT}.noise_multiplier=1e-200"],
     "query", "privacy.epsilon=5.0"),
    ("privacy: {by: site}",
     [*NOISED, f"{SOFT}.noise_multiplier=20", f"{SOFT}.reproducible_noise=true"],
     "query", "reproducible_noise soft_label_sums privacy.by"),
    ("rounds: 3", ["rounds=3"], "train", "round 4 rounds=3"),
    ("hours: ['00:00-12:00', '13:00-14:00']", [], "evaluate", "12:00 hours"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("text", "words", "kind", "named"), REFUSED)
def test_a_rule_refuses(text, words, kind, named, tmp_path):
    with refused("client 1", *named.split(), kind=(PolicyError, SiteError)):
        ask(words, kind, {"round": 4}, policy=str(written(tmp_path, text)))


ALLOWED = [
    ("rounds: 30", []),
    ("tasks: [mnist, digits]", []),
    ("folders: [/data]", []),
    ("functions: []", ["strategy=[feddw,fedpvr,fedavgm]", "logger=tensorboard"]),
    ("bundles: [ab]", []),  # nobody compares in a simulation
    ("hours: ['20:00-06:00']", []),  # a registration counts only
    ("payloads: ['soft_*', control_variate_delta]", ["strategy=[feddw,fedpvr]"]),
    ("privacy: {by: server, epsilon: 60}", [*CENTRAL, "rounds=50"]),
    ("privacy: {by: site, epsilon: 1.01}", [LOCAL, "rounds=1"]),
    ("privacy: {by: site, epsilon: 1.2}", [*NOISED, f"{SOFT}.noise_multiplier=5"]),  # 1.09
]


@pytest.mark.slow
@pytest.mark.parametrize(("text", "words"), ALLOWED)
def test_a_rule_lets_a_run_pass(text, words, tmp_path):
    assert "client" in ask(words, policy=str(written(tmp_path, text))).content


def hits(logits, labels):
    """A metric of the user's."""
    return (logits.argmax(1) == labels).float().mean()


def test_a_span_of_hours_may_go_over_midnight():
    """At noon, ``at_noon`` says."""
    spans = ["20:00-12:30", "11:30-06:00", "20:00-06:00", "20:00-12:00"]
    assert [rules._is_open([span]) for span in spans] == [True, True, False, False]


def test_a_payload_that_no_side_declares_stays_at_the_site():
    reply = Reply(1, 5, 5, 0.5, {}, payloads={"names": {}, "sums": {}})
    side = PolicySide(SitePolicy(Policy(payloads=["sums"]), 1), None, None, None)
    with refused("client 1", "names", kind=PolicyError):
        side.upload(reply, {}, None)


@pytest.mark.slow
def test_nothing_is_read_before_a_run_is_refused(tmp_path):
    words = ["task=image_folder", "task.classes=[a,b]", "partition=site", "task.path=/nowhere"]
    with refused("tasks=[digits]", kind=PolicyError):
        ask(words, policy=str(written(tmp_path, "tasks: [digits]")))


@pytest.mark.slow
def test_a_pinned_site_is_no_simulation(tmp_path, monkeypatch):
    path = written(tmp_path, "own_code: /app")
    monkeypatch.setenv(rules.PINNED, "1")
    with refused("runtime.simulation=true", "own_code", kind=PolicyError):
        ask([], policy=str(path))
    assert "client" in ask(["runtime.simulation=false"], policy=str(path)).content


# ---- the file ------------------------------------------------------------------------------------

WRONG = {
    "taks: [a]": "taks tasks",
    "tasks: mnist": "tasks=mnist",
    "rounds: 0": "rounds=0",
    "hours: ['20-25']": "hours",
    "hours: ['08:00Z-17:00Z']": "hours",
    "privacy: {by: me}": "privacy.by=me site server",
    "privacy: {epsilon: 3}": "privacy.epsilon privacy.by",
    "privacy: {epsilom: 3}": "privacy.epsilom epsilon",
    "": "policy.yaml",
    "- a": "policy.yaml",
    "tasks: [": "policy.yaml",
    "1: 2": "policy.yaml",
}


@pytest.mark.parametrize(("text", "named"), WRONG.items())
def test_a_wrong_file_names_the_key(text, named, tmp_path):
    with refused(*named.split()):
        read_policy(written(tmp_path, text))


def test_a_missing_file_forbids_everything_and_a_changed_one_counts_at_once(tmp_path, monkeypatch):
    path = tmp_path / "policy.yaml"
    monkeypatch.setenv(ENVIRONMENT, str(path))
    with refused(str(path)):
        ask([])
    path.write_text("tasks: [digits]")
    ask([])
    path.write_text("tasks: [mnist]")
    with refused("tasks=[mnist]", kind=PolicyError):
        ask([])


def test_a_deployment_has_its_sites_policies_and_no_simulated_ones(tmp_path):
    path = written(tmp_path, "tasks: [mnist]")
    with refused("site.policy", "node-config"):
        ask([f"site.policy={path}", "runtime.simulation=false"])
    with refused("tasks=[mnist]", kind=SiteError):
        ask(["runtime.simulation=false"], policy=str(path))


@pytest.mark.slow
def test_the_command_prints_the_rules_and_what_they_forbid(tmp_path, monkeypatch, capsys):
    path = written(tmp_path, "{rounds: 20, privacy: {by: site}}")

    def said(*words: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["fedhet-policy", *words])
        command.main()
        return capsys.readouterr().out.splitlines()

    assert said(str(path)) == ["rounds=20", "privacy.by=site"]
    assert said(str(path), LOCAL, "rounds=9") == said(str(path))
    with pytest.raises(SystemExit):
        said(str(path), LOCAL, "rounds=30")
    assert "rounds=30 (rounds=20)" in capsys.readouterr().err
    assert "fedhet-policy policy.yaml" in "".join(said())


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_without_a_site_that_refuses_it_or_ends(tmp_path, caplog):
    path = written(tmp_path, "{site: Basel, tasks: [mnist]}")
    words = [*TINY, f"site.policy={{1:{path}}}", "rounds=2"]
    with refused("Basel", "client 1", "tasks=[mnist]", kind=TimeoutError):
        run_recipe(tmp_path / "ends", *words)
    summary = run_recipe(tmp_path / "goes_on", *words, "runtime.min_clients=2")
    assert (summary["status"], summary["failures"]) == ("completed", 0)
    rows = read_rows(tmp_path / "goes_on" / "metrics.jsonl")
    assert [(row["clients"], row["absent"]) for row in rows[1:]] == [([0, 2], [1])] * 2
    assert "the policy of Basel (client 1) forbids task=digits" in caplog.text


@pytest.mark.slow
def test_a_site_that_refuses_in_the_middle_is_a_failure_of_that_round(tmp_path):
    path = written(tmp_path, "rounds: 2")

    def node(client: int) -> dict[str, str]:
        return {"policy": str(path)} if client == 1 else {}

    def shrink(reply: Message) -> Message:
        if reply.metadata.src_node_id == 101 and reply.has_content() and METRICS in reply.content:
            path.write_text("rounds: 1")
        return reply

    summary = run_recipe(tmp_path / "run", *TINY, "rounds=2", tamper=shrink, node_config=node)
    assert summary["failures"] == 1
    [failure] = read_rows(tmp_path / "run" / "metrics.jsonl")[2]["failures"]
    assert "client 1" in failure
    assert "rounds=1" in failure


def sent_by(folder: Path, text: str, *words: str, run: str = "run") -> dict[str, list[Message]]:
    """Return client 1's replies in a run of one round, by the records that they have."""
    found: dict[str, list[Message]] = {}

    def seen(reply: Message) -> Message:
        if reply.metadata.src_node_id == 101:
            found.setdefault(" ".join(sorted(reply.content)), []).append(reply)
        return reply

    path = written(folder, text)
    words = (*TINY, "rounds=1", f"site.policy={{1:{path}}}", *words)
    assert run_recipe(folder / run, *words, tamper=seen)["failures"] == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("strategy=fedprox",), (LOCAL,)])
def test_everything_but_the_update_stays_at_the_site(words, tmp_path):
    found = sent_by(tmp_path, NOTHING, *words)
    [trained] = found[f"{METRICS} {UPDATE}"]
    assert set(trained.content[METRICS]) == COUNTS
    assert found.keys() == {"client", f"{METRICS} {UPDATE}"}


@pytest.mark.slow
def test_numbers_of_a_secure_sum_stay_at_the_site_too(tmp_path):
    secure = ["strategy/secure_aggregation=secagg_plus", "strategy=fedavg", "rounds=1"]
    run_recipe(tmp_path / "all", *TINY, *secure, f"site.policy={written(tmp_path, NOTHING)}")
    row = read_rows(tmp_path / "all" / "metrics.jsonl")[1]
    assert row["failures"] == []
    assert "train_loss" not in row
    assert "received_loss" not in row


@pytest.mark.slow
def test_numbers_of_few_examples_stay_at_the_site(tmp_path):
    words = ["partition=iid", "partition.holdout=0.1", "evaluation.metrics=[accuracy]"]
    words += ["evaluation.per_class=true", "evaluation.model=both"]
    found = sent_by(tmp_path, "min_examples: 10", *words)
    [trained] = found[f"{METRICS} {UPDATE}"]
    sent = set(trained.content[METRICS])
    assert {"train-loss", "received-loss", "received-accuracy", "personal-accuracy"} <= sent
    assert [name for name in sent if "/" in name and not name.startswith("personal-test-")] == []
    found = sent_by(tmp_path, "min_examples: 100", *words, run="more")
    [trained] = found[f"{METRICS} {UPDATE}"]
    sent = {name for name in trained.content[METRICS] if not name.startswith("personal-test-")}
    assert sent == COUNTS | {"train-loss", "fit-seconds"}


@pytest.mark.slow
def test_a_confusion_matrix_leaves_without_classes_of_few_examples(tmp_path, caplog):
    words = ["partition=iid", "partition.holdout=0.3", "evaluation.confusion=true"]
    everything, enough = (
        next(reply.content[CONFUSION] for reply in found[CONFUSION] if CONFUSION in reply.content)
        for found in (
            sent_by(tmp_path, f"min_examples: {least}", *words, run=str(least)) for least in (1, 6)
        )
    )
    rows = everything[ANSWERS].numpy()
    assert 0 < (rows.sum(axis=1) >= 6).sum() < 10
    kept = rows * (rows.sum(axis=1, keepdims=True) >= 6)
    assert (enough[ANSWERS].numpy() == kept).all()
    policy = f"site.policy={written(tmp_path, 'min_examples: 50')}"
    summary = run_recipe(tmp_path / "none", *TINY, "rounds=1", policy, *words)
    assert list(summary[CONFUSION]) == ["error"]
    assert "min_examples=50" in caplog.text


@pytest.mark.slow
def test_an_evaluation_leaves_without_what_stays_at_the_site(tmp_path):
    found = sent_by(tmp_path, "metrics: [loss]", "evaluation.clients=true")
    assert {frozenset(reply.content[METRICS]) for reply in found[METRICS]} == {
        frozenset({"partition-id", "num-examples", "loss"})
    }
    own = "tests.client_app.test_policy:hits"  # a policy names it as replies do
    words = ["evaluation.clients=true", f"evaluation.metrics=[{own}]"]
    found = sent_by(tmp_path, "metrics: [hits]", *words, run="own")
    assert {frozenset(reply.content[METRICS]) for reply in found[METRICS]} == {
        frozenset({"partition-id", "num-examples", "hits"})
    }


def test_a_fit_of_columns_needs_enough_rows_with_a_number():
    def sent(rows: float, *counts: float) -> Message:
        tensors = {"rows": torch.tensor([rows]), "counts": torch.tensor(counts)}
        content = RecordDict({COLUMNS: to_record(tensors)})
        return Message(content, dst_node_id=1, message_type=f"query.{COLUMNS}")

    policy = SitePolicy(Policy(min_examples=20), 1)
    assert policy.with_columns(sent(40.0, 40.0, 20.0, 0.0)).has_content()
    for few in (sent(19.0, 19.0), sent(40.0, 40.0, 1.0)):
        with refused("client 1", "min_examples=20", kind=PolicyError):
            policy.with_columns(few)

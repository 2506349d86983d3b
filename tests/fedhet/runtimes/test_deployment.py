"""runtime=deployment without a SuperLink: addresses, certificates, and what a log tells."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from omegaconf import DictConfig, OmegaConf

from common.results import ResultsFollower, read_rows
from common.run_events import ROW, heard, told
from conf import compose_overrides, resume_fingerprint
from fedhet.runtimes.deployment import run as run_module
from fedhet.runtimes.deployment.connection import Connection, check_reachable, connection_of
from fedhet.runtimes.deployment.control_client import RunStatus
from fedhet.runtimes.deployment.log_stream import LogStream
from fedhet.runtimes.deployment.run import DeploymentRun
from fedhet.runtimes.deployment.run_record import RunRecord, read_record
from fedhet.runtimes.deployment.story import Story, write_rows
from fedhet.runtimes.flower_install import LaunchError
from fedhet.sweep.resume import Plan, plan_for
from server_app.loggers import LoggedRun
from server_app.loggers.run_log import RunLog
from tests.test_docker import keys


def recipe(**values: object) -> DictConfig:
    """Return a recipe with other values; `runtime__address` stands for runtime.address."""
    found = compose_overrides(("runtime=deployment", "clients=3")).copy()
    for key, value in values.items():
        OmegaConf.update(found, key.replace("__", "."), value)
    return found


# ---- what is refused before the run --------------------------------------------------------------


@pytest.mark.parametrize(("online", "least"), [(3, None), (2, 2), (2, 1), (4, 9)])
def test_enough_supernodes(online, least, tmp_path):
    submit_with(online, recipe(runtime__min_clients=least), tmp_path)


@pytest.mark.parametrize(("online", "least"), [(2, None), (2, 9), (1, 2), (0, 1)])
def test_too_few_supernodes_are_refused(online, least, tmp_path):
    with pytest.raises(LaunchError, match=rf"clients=3.*but {online} SuperNodes .*min_clients="):
        submit_with(online, recipe(runtime__min_clients=least), tmp_path)


def submit_with(online: int, launched: DictConfig, folder: Path) -> None:
    """Submit to a SuperLink that has so many nodes, and see that it starts the run."""
    engine: Any = DeploymentRun(launched.runtime, folder / "log.txt")
    engine._control = SimpleNamespace(online_nodes=lambda: online)
    engine._start, engine._follow = lambda *_: "started", lambda record: started.append(record)
    started: list[str] = []
    engine.submit(launched, [])
    assert started == ["started"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"address": "server"}, r"runtime\.address=server is no address.*host:port"),
        ({"address": "server:port"}, r"is no address"),
        ({"root_certificates": "/no/ca.crt"}, r"root_certificates=/no/ca\.crt is no file"),
        ({"insecure": True, "root_certificates": "/x"}, r"insecure=true.*one of them"),
        ({"connection": "prod"}, r"runtime\.connection=prod, but .*config\.toml names no"),
    ],
)
def test_a_connection_that_is_none_is_refused(values, message, monkeypatch, tmp_path):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    runtime = OmegaConf.merge(recipe().runtime, values)
    with pytest.raises(LaunchError, match=message):
        connection_of(runtime)


def test_a_connection_of_flowers_config(monkeypatch, tmp_path):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    ca = tmp_path / "ca.crt"
    ca.touch()
    (tmp_path / "config.toml").write_text(
        f'[superlink]\ndefault = "lab"\n[superlink.lab]\naddress = "10.0.0.1:8000"\n'
        f'root-certificates = "{ca}"\nfederation = "@me/ours"\n'
    )
    found = connection_of(recipe(runtime__connection="lab").runtime)
    assert found == Connection("10.0.0.1:8000", str(ca), False, "@me/ours")
    assert (found.host, found.port) == ("10.0.0.1", 8000)
    with pytest.raises(LaunchError, match=r"connection=prod is not in .*; allowed: lab"):
        connection_of(recipe(runtime__connection="prod").runtime)


@contextlib.contextmanager
def listening(answer: bytes, context: ssl.SSLContext | None = None) -> Iterator[str]:
    """Listen, answer every request so, and yield the address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = listener.accept()
                with contextlib.suppress(OSError), plain:
                    end = context.wrap_socket(plain, server_side=True) if context else plain
                    end.settimeout(2)
                    if end.recv(4096) and answer:
                        end.sendall(answer)
                    end.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def answer(title: str = "SuperLink API", version: str = "1.39.0") -> bytes:
    """Return what a server says of itself."""
    text = json.dumps({"info": {"title": title, "version": version}})
    return f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()


OK = answer()


@pytest.fixture(scope="module")
def authorities(tmp_path_factory) -> list[Path]:
    """Return two servers' keys/, each of a CA of its own."""
    folders = []
    for name in ("a", "b"):
        folder = tmp_path_factory.mktemp(name)
        keys.make_server(folder / "ca", folder / "server", ["fl.example.org"])
        folders.append(folder / "server" / "keys")
    return folders


def served_by(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    return context


def test_a_control_with_the_right_ca_is_reached(authorities):
    with listening(OK, served_by(authorities[0])) as address:
        check_reachable(Connection(address, str(authorities[0] / "ca.crt")))


def test_a_control_without_tls_is_reached_if_that_is_said():
    with listening(OK) as address:
        check_reachable(Connection(address, insecure=True))


def test_nobody_there_is_said():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(LaunchError, match=r"no SuperLink answers at runtime\.address=127.*refused"):
        check_reachable(Connection(f"127.0.0.1:{port}"))


def test_another_ca_is_refused(authorities):
    with (
        listening(OK, served_by(authorities[0])) as address,
        pytest.raises(LaunchError, match=r"refused \(.*\): runtime\.root_certificates=.*has to be"),
    ):
        check_reachable(Connection(address, str(authorities[1] / "ca.crt")))


def test_no_tls_where_it_is_expected_is_said(authorities):
    with (
        listening(OK) as address,
        pytest.raises(LaunchError, match=r"does not speak TLS .*insecure=true"),
    ):
        check_reachable(Connection(address, str(authorities[0] / "ca.crt")))


def test_what_is_no_control_is_said(authorities):
    """As the Fleet's port, which hangs up on HTTP/1, and another server."""
    ca = str(authorities[0] / "ca.crt")
    with (
        listening(b"", served_by(authorities[0])) as address,
        pytest.raises(LaunchError, match=r"is no Control.* hangs up .*not the Fleet's"),
    ):
        check_reachable(Connection(address, ca))
    for other in (answer(title="Other API"), b"HTTP/1.1 404 No\r\ncontent-length: 2\r\n\r\nno"):
        with (
            listening(other, served_by(authorities[0])) as address,
            pytest.raises(LaunchError, match=r"is no Control .*something else answers"),
        ):
            check_reachable(Connection(address, ca))


def test_a_superlink_of_another_line_is_refused(authorities):
    with (
        listening(answer(version="1.41.0"), served_by(authorities[0])) as address,
        pytest.raises(LaunchError, match=r"of flwr 1\.41\.0, and this launcher .* 1\.39"),
    ):
        check_reachable(Connection(address, str(authorities[0] / "ca.crt")))


@pytest.mark.parametrize("lacking", ["{server}", "{here}"])
def test_a_fetch_that_does_not_say_where_is_refused(lacking, tmp_path):
    command = "cp -R {server} {here}".replace(lacking, "somewhere")
    with pytest.raises(LaunchError, match=rf"lacks \{lacking[:-1]}\}}"):
        DeploymentRun(recipe(runtime__fetch=command).runtime, tmp_path / "log.txt")


# ---- the log tells the rows ----------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"round": t, "accuracy": t / 7, "failures": ["ü\n"]} for t in range(4)
]


def test_what_a_run_tells_is_heard(tmp_path, capsys):
    run = LoggedRun(tmp_path, {}, {"rounds": 3}, ROWS[:2])
    log = RunLog()
    log.start(run)
    log.log(ROWS[2])
    log.finish({"status": "completed", "loss": float("nan")})
    story = Story()
    lines = capsys.readouterr().out.splitlines(keepends=True)
    assert all(story.hear(line) for line in lines)
    assert story.start["config"] == {"rounds": 3}
    assert story.start["folder"] == str(tmp_path)
    assert story.rows == ROWS[:3]
    assert story.summary["status"] == "completed"


def test_other_lines_and_half_lines_are_none():
    assert heard("INFO: [round 1/3]\n") is None
    assert heard(told(ROW, ROWS[1])[:-5]) is None
    assert heard("progress 50%" + told(ROW, ROWS[1])) == (ROW, ROWS[1])


def test_rows_that_come_twice_or_again_are_there_once():
    story = Story()
    for number in (0, 1, 1, 2, 1):
        story.hear(told(ROW, ROWS[number]))
    assert story.rows == ROWS[:2]


def test_the_launchers_folder_is_known_by_its_token(tmp_path, capsys):
    RunRecord("abc", 7, "/there", "s:1", "r", 3, 0).write(tmp_path)
    RunLog().start(LoggedRun(tmp_path, {}, {}, []))
    (_, start) = heard(capsys.readouterr().out) or ("", {})
    assert start["token"] == "abc"


def test_a_log_read_again_from_the_beginning_brings_no_old_news(tmp_path):
    path = tmp_path / "metrics.jsonl"
    results = ResultsFollower(tmp_path)
    seen = []
    for rows in (ROWS[:1], ROWS[:3], ROWS[:1], ROWS[:2], ROWS):
        write_rows(path, rows)
        seen += [row["round"] for row in results.new_rows()]
    assert seen == [0, 1, 2, 3]
    assert read_rows(path) == ROWS


def test_rows_that_were_measured_again_replace_the_old(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, ROWS)
    other = [*ROWS[:2], {"round": 2, "accuracy": 0.9}]
    write_rows(path, other)
    assert read_rows(path) == other


# ---- which run a results directory belongs to ----------------------------------------------------


class FakeControl:
    """A SuperLink on which one run is known."""

    def __init__(self, known: RunStatus | None) -> None:
        self.known, self.started = known, []

    def online_nodes(self) -> int:
        return 3

    def status(self, run_id: int) -> RunStatus | None:
        return self.known

    def start(self, words):
        self.started.append(words)
        return 8


def resumed(monkeypatch, folder: Path, known: RunStatus | None, **values: object):
    """Submit with resume=true where run 7 to round 3 was; return the control and what is followed.

    The run that is followed is that of the record.
    """
    before = RunRecord("t", 7, "/srv/x", "127.0.0.1:8000", resume_fingerprint(recipe()), 3, 0)
    before.write(folder)
    launched = recipe(**({"resume": True, "rounds": 3, "results_dir": str(folder)} | values))
    engine = DeploymentRun(launched.runtime, folder / "log.txt")
    control = FakeControl(known)
    followed: list[RunRecord] = []
    monkeypatch.setattr(engine, "_control", control, raising=False)
    monkeypatch.setattr(engine, "_follow", followed.append)
    engine.submit(launched, ["resume=true"])
    return control, followed[0]


@pytest.mark.parametrize("status", ["pending", "starting", "running", "finished:completed"])
def test_a_run_that_goes_on_is_followed(monkeypatch, tmp_path, status):
    control, followed = resumed(monkeypatch, tmp_path, RunStatus(status))
    assert followed.run_id == 7
    assert control.started == []


@pytest.mark.parametrize(
    "known", [RunStatus("finished:failed"), RunStatus("finished:stopped"), None]
)
def test_a_run_that_has_broken_off_is_gone_on_with(monkeypatch, tmp_path, known):
    write_rows(tmp_path / "metrics.jsonl", ROWS)
    (tmp_path / "log.txt").write_text("of run 7\n")
    control, followed = resumed(monkeypatch, tmp_path, known)
    assert (followed.run_id, followed.server_folder) == (8, "/srv/x")
    assert followed.log_begins == len("of run 7\n")
    assert read_record(tmp_path) == followed
    [words] = control.started
    assert "results_dir='/srv/x'" in words
    assert "resume=false" not in words


@pytest.mark.parametrize("before", ["of run 7\n", ""])
def test_a_run_that_is_followed_again_is_in_the_log_once(tmp_path, before):
    """The SuperLink sends all of it each time."""

    class Control:
        def stream_log(self, run_id: int, raw: IO[bytes]) -> subprocess.Popen[bytes]:
            raw.write(b"round 1\nround 2\n")
            return subprocess.Popen(["true"])

    log = tmp_path / "log.txt"
    log.write_text(before)
    for _ in range(2):
        stream = LogStream(Control(), 8, tmp_path / "raw", log, len(before))
        stream.open()
        stream.wait(10)
        stream.close()
    assert log.read_text() == before + "round 1\nround 2\n"
    log.unlink()
    stream.open()
    stream.close()
    assert log.read_text() == ""


def test_a_run_that_failed_before_its_first_round_begins_anew(monkeypatch, tmp_path):
    control, _ = resumed(monkeypatch, tmp_path, RunStatus("finished:failed"))
    assert control.started[0][-1] == "resume=false"


def test_a_completed_run_goes_on_to_a_later_round(monkeypatch, tmp_path):
    write_rows(tmp_path / "metrics.jsonl", ROWS)
    control, _ = resumed(monkeypatch, tmp_path, RunStatus("finished:completed"), rounds=5)
    assert control.started


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rounds": 5}, r"rounds=5, but run 7 still goes on to rounds=3"),
        ({"local.lr": 0.3}, r"belongs to run 7, which has another recipe"),
    ],
)
def test_another_recipe_is_refused(monkeypatch, tmp_path, values, message):
    with pytest.raises(LaunchError, match=message):
        resumed(monkeypatch, tmp_path, RunStatus("running"), **values)


def test_a_run_is_known_by_its_id_behind_whatever_address(monkeypatch, tmp_path):
    """A tunnel may have another port the next day; another SuperLink does not know the run."""
    other = {"runtime__address": "127.0.0.1:8001"}
    _, followed = resumed(monkeypatch, tmp_path, RunStatus("running"), **other)
    assert followed.run_id == 7
    with pytest.raises(LaunchError, match=r"of the SuperLink at 127\.0\.0\.1:8000; the one at"):
        resumed(monkeypatch, tmp_path, None, **other)


def test_a_run_that_is_not_accepted_leaves_the_folder_as_it_was(monkeypatch, tmp_path):
    engine = DeploymentRun(recipe().runtime, tmp_path / "log.txt")
    control = FakeControl(None)
    monkeypatch.setattr(engine, "_control", control, raising=False)

    def refuse(words):
        assert read_record(tmp_path)
        raise LaunchError("no")

    monkeypatch.setattr(control, "start", refuse)
    with pytest.raises(LaunchError, match="no"):
        engine.submit(recipe(results_dir=str(tmp_path)), [])
    assert not list(tmp_path.iterdir())


def test_a_sweep_goes_on_with_a_job_whose_checkpoints_are_elsewhere(tmp_path):
    RunRecord("t", 7, "/srv/x", "s:1", resume_fingerprint(recipe()), 3, 0).write(tmp_path)
    assert plan_for(tmp_path, recipe()) is Plan.CONTINUE
    assert plan_for(tmp_path, recipe(local__lr=0.3)) is Plan.REPLACE


def test_what_is_fetched_is_looked_at(monkeypatch, tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "model.safetensors").write_bytes(b"cut off")
    copy = "cp -R {server}/. {here}"
    engine = DeploymentRun(recipe(runtime__fetch=copy).runtime, here / "log.txt")
    engine._record = RunRecord("t", 7, str(there), "s:1", "r", 3, 0)
    monkeypatch.setattr(run_module, "_is_the_model", lambda path, _: path.read_bytes() == b"whole")
    with pytest.raises(LaunchError, match=r"has brought no model\.safetensors .*resume=true"):
        engine._fetch_results({})
    (there / "model.safetensors").write_bytes(b"whole")
    engine._fetch_results({})
    assert json.dumps(sorted(path.name for path in here.iterdir())) == '["model.safetensors"]'

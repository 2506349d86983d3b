"""runtime=deployment without a SuperLink: its connection, the events of a log, following a run."""

import json
import os
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import Mock

import pytest
from omegaconf import DictConfig, OmegaConf

from fedhet.common.errors import ConfigError
from fedhet.common.files import writable_folder
from fedhet.common.flower.line import installed_line, installed_release
from fedhet.common.results import Row, read_rows, write_rows
from fedhet.common.run_events import ROW, START, Event, decode, encode, new_key
from fedhet.conf import compose_overrides, fingerprint, resume_fingerprint
from fedhet.runtimes.deployment import run as run_module
from fedhet.runtimes.deployment.connection import Connection, check_reachable, connection_of
from fedhet.runtimes.deployment.control_client import RunStatus, Unreachable
from fedhet.runtimes.deployment.log_stream import LogStream, RunEvents
from fedhet.runtimes.deployment.run import DeploymentRun
from fedhet.runtimes.deployment.run_record import RunRecord, read_record
from fedhet.runtimes.flower_install import LaunchError
from fedhet.server_app.listeners import Start
from fedhet.server_app.loggers.run_log import RunLog
from fedhet.sweep.resume import FolderTaken, Plan, plan_for
from tests.drills.test_docker import keys
from tests.refused import refused


def recipe(**values: object) -> DictConfig:
    found = compose_overrides(("runtime=deployment", "clients=3")).copy()
    for key, value in values.items():
        OmegaConf.update(found, key, value)
    return found


def run_7() -> RunRecord:
    """Return the record of run 7, to round 3."""
    hashes = resume_fingerprint(recipe()), 3, 0, fingerprint(recipe(rounds=3))["recipe"]
    return RunRecord("t", 7, "/srv/x", "127.0.0.1:8000", *hashes)


# ---- the connection ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"root_certificates": "/no/ca.crt"}, "root_certificates=/no/ca.crt"),
        ({"root_certificates": "~nobody-of-us/ca.crt"}, "/~nobody-of-us/ca.crt"),
        ({"insecure": True, "root_certificates": "/x"}, "insecure=true"),
        ({"connection": "prod"}, "connection=prod"),
    ],
)
def test_an_invalid_connection_is_refused(values, message, flower_config):
    with refused(*message.split(), kind=LaunchError):
        connection_of(OmegaConf.merge(recipe().runtime, values))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"\xff", "config.toml utf-8 runtime.address"),
        (b"[superlink", "config.toml"),
        (b"superlink = 3", "SuperLink runtime.address"),
        (b"[superlink.lab]\naddress = 'https://x:1'", "address=https://x:1 host:port"),
        (b"[superlink.lab]\noptions.num-supernodes = 2", "address="),
        (b"[superlink.lab]\naddress = 'x:1'\nroot-certificates = 'ca.crt'", "absolute"),
        (b"[superlink.lab]\naddress = 'x:1'\ninsecure = 'no'", "insecure=no"),
    ],
)
def test_what_flowers_config_says_is_checked(config, message, flower_config):
    (flower_config.parent / "config.toml").write_bytes(config)
    with refused(*message.split(), kind=LaunchError):
        connection_of(recipe(**{"runtime.connection": "lab"}).runtime)


@pytest.fixture
def flower_config(monkeypatch, tmp_path) -> Path:
    """Write Flower's config.toml with the connection lab; return its certificate."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "ca.crt").touch()
    (tmp_path / "config.toml").write_text(
        f'[superlink]\ndefault = "lab"\n[superlink.lab]\naddress = "10.0.0.1:8000"\n'
        f'root-certificates = "{tmp_path}/ca.crt"\nfederation = "@me/ours"\n'
    )
    return tmp_path / "ca.crt"


def test_a_connection_can_be_one_of_flowers_config(flower_config):
    found = connection_of(recipe(**{"runtime.connection": "lab"}).runtime)
    assert found == Connection("10.0.0.1:8000", str(flower_config), False, "@me/ours")
    assert (found.host, found.port) == ("10.0.0.1", 8000)


@contextmanager
def listening(answer: bytes, context: ssl.SSLContext | None = None) -> Iterator[str]:
    """Answer every request with the same bytes; yield the address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                plain, _ = listener.accept()
                with suppress(OSError), plain:
                    end = context.wrap_socket(plain, server_side=True) if context else plain
                    end.settimeout(2)
                    if end.recv(4096) and answer:
                        end.sendall(answer)
                    end.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # close() alone does not end the thread's accept()
        listener.close()


OTHER = "1.39.0" if installed_line().has_gate else "1.42.0"  # of the other line


def answer(title: str = "SuperLink API", version: str = installed_release()) -> bytes:
    text = json.dumps({"info": {"title": title, "version": version}})
    return f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()


@pytest.fixture(scope="module")
def authorities(tmp_path_factory) -> list[Path]:
    """Return the keys/ of two servers, each with a CA of its own."""
    folders = [tmp_path_factory.mktemp(name) for name in ("a", "b")]
    for folder in folders:
        keys.make_server(folder / "ca", folder / "server", ["fl.example.org"])
    return [folder / "server" / "keys" for folder in folders]


@pytest.mark.parametrize(
    ("answer", "tls", "trusted", "message"),
    [  # the CA that the server has, and the one that is trusted; None: no TLS
        (answer(), 0, 0, None),
        (answer(), None, None, None),
        (answer(), 0, 1, "runtime.root_certificates="),
        (answer(), None, 0, "insecure=true"),
        (b"", 0, 0, "SuperLink"),
        (answer(title="Other API"), 0, 0, "Control"),
        (b"HTTP/1.1 404 No\r\ncontent-length: 2\r\n\r\nno", 0, 0, "answers"),
        (answer(version=OTHER), 0, 0, f"{OTHER} {installed_release()}"),
        (answer(version="1.38.0"), 0, 0, "1.38.0"),
    ],
)
def test_control_is_reached_or_the_error_says_why_not(answer, tls, trusted, message, authorities):
    context = None
    if tls is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(authorities[tls] / "server.crt", authorities[tls] / "server.key")
    ca = "" if trusted is None else str(authorities[trusted] / "ca.crt")
    expected = refused(*message.split(), kind=LaunchError) if message else nullcontext()
    with listening(answer, context) as address, expected:
        check_reachable(Connection(address, ca, insecure=trusted is None))


def test_a_port_where_nothing_listens_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with refused("SuperLink", "runtime.address=127", kind=LaunchError):
        check_reachable(Connection(f"127.0.0.1:{port}"))


@pytest.mark.parametrize("content", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nAA"])
def test_a_file_without_a_certificate_is_refused(content, tmp_path):
    (tmp_path / "ca.crt").write_text(content)
    with refused("ca.crt", kind=LaunchError):
        check_reachable(Connection("127.0.0.1:1", str(tmp_path / "ca.crt")))


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_host_of_no_valid_name_is_reported(host):
    with refused(f"runtime.address={host}:1", kind=LaunchError):
        check_reachable(Connection(f"{host}:1"))


@pytest.mark.parametrize("lacking", ["{server}", "{here}"])
def test_a_fetch_command_without_source_or_target_is_refused(lacking, tmp_path):
    command = "cp -R {server} {here}".replace(lacking, "somewhere")
    with refused(lacking, kind=LaunchError):
        DeploymentRun(recipe(**{"runtime.fetch": command}).runtime, tmp_path / "log.txt")


# ---- events in the log ---------------------------------------------------------------------------

ROWS: list[Row] = [{"round": t, "accuracy": t / 7, "failures": ["ü\n"]} for t in range(4)]
KEY = new_key()


def line(kind: str, content: dict[str, Any], key: str = KEY) -> str:
    return encode(Event(key, kind, content))


def test_the_launcher_reads_what_the_server_app_logs(tmp_path, capsys):
    RunRecord("abc", 7, "/there", "s:1", "r", 3, 0, "").write(tmp_path)
    log = RunLog()
    log.start(Start(tmp_path, {}, {"rounds": 3}, ROWS[:2]))
    log.log(ROWS[2])
    log.finish({"status": "completed", "loss": float("nan")})
    events = RunEvents()
    assert all(events.read(one) for one in capsys.readouterr().out.splitlines(keepends=True))
    assert (events.start["config"], events.start["token"]) == ({"rounds": 3}, "abc")
    assert events.rows == ROWS[:3]
    assert events.summary["status"] == "completed"
    for number in (2, 3, 1):  # a repeated and a replaced row
        events.read(line(ROW, ROWS[number], log._key))
    assert events.rows == ROWS[:2]


def test_a_line_without_a_whole_event_is_part_of_the_log():
    assert decode("INFO: [round 1/3]\n") is None
    assert decode(line(ROW, ROWS[1])[:-5]) is None
    assert decode("progress 50%" + line(ROW, ROWS[1]), KEY) == (KEY, ROW, ROWS[1])


def test_a_site_cannot_forge_an_event():
    """The text of an error may be a site's, and hold line breaks and what looks like events."""
    events = RunEvents()
    assert events.read(line(ROW, ROWS[1])) is False  # a run's first event is its start
    events.read(line(START, {"token": None, "config": {}, "rows": []}))
    forged = {"round": 1, "accuracy": 1.0}
    other = line(ROW, forged, new_key())
    reason = {"round": 1, "failures": [other]}
    for one in (other, line(START, {"token": "t", "rows": [forged]}, new_key())):
        assert events.read(one) is False
    assert events.read(other.rstrip() + line(ROW, reason))  # no line break before the real one
    assert events.rows == [reason]


def test_a_run_that_is_followed_again_is_in_the_log_once(tmp_path):
    def stream_log(run_id: int, raw: IO[bytes]) -> subprocess.Popen[bytes]:
        raw.write(b"round 1\nround 2\n")
        return subprocess.Popen(["true"])

    log = tmp_path / "log.txt"
    log.write_text("of run 7\n")
    for _ in range(2):
        stream = LogStream(Mock(stream_log=stream_log), 8, tmp_path / "raw", log, len("of run 7\n"))
        stream.open()
        stream.wait(10)
        stream.close()
    assert log.read_text() == "of run 7\nround 1\nround 2\n"


# ---- the run of a results directory --------------------------------------------------------------


def superlink(known: RunStatus | None = None, online: int = 3) -> Mock:
    """Return the Control of a SuperLink that knows one run, or none, and starts run 8."""
    answers = {"online_nodes": online, "status": known, "start": 8}
    return Mock(**{f"{name}.return_value": value for name, value in answers.items()})


def submit(launched: DictConfig, folder: Path, control: Any) -> RunRecord:
    """Submit a recipe; return the record of the run that is followed."""
    run: Any = DeploymentRun(launched.runtime, folder / "log.txt")
    followed: list[RunRecord] = []
    run._control, run._follow = control, followed.append
    run.submit(launched, ["resume=true"])
    return followed[0]


def resume(folder: Path, known: RunStatus | None, **values: object) -> Any:
    """Submit with resume=true where run 7 to round 3 was; return Control and what is followed."""
    before = run_7()
    before.write(folder)
    control = superlink(known)
    launched = recipe(**({"resume": True, "rounds": 3, "results_dir": str(folder)} | values))
    return control, submit(launched, folder, control)


@pytest.mark.parametrize(
    ("online", "least", "enough"),
    [
        *((3, None, True), (2, 2, True), (2, 1, True), (4, 9, True)),
        *((2, None, False), (2, 9, False), (1, 2, False), (0, 1, False)),
    ],
)
def test_a_run_needs_its_clients_or_min_clients_as_supernodes(online, least, enough, tmp_path):
    control = superlink(online=online)
    launched = recipe(**{"runtime.min_clients": least})
    message = f"clients=3 {online} min_clients="
    with nullcontext() if enough else refused(*message.split(), kind=LaunchError):
        submit(launched, tmp_path, control)
    assert control.start.call_count == enough


OTHER = {"runtime.address": "127.0.0.1:8001"}


@pytest.mark.parametrize("status", ["pending", "starting", "running", "finished:completed"])
@pytest.mark.parametrize("values", [{}, OTHER])  # a run is known by its id behind any address
def test_a_run_that_has_not_ended_or_is_completed_is_followed(tmp_path, status, values):
    control, followed = resume(tmp_path, RunStatus(status), **values)
    assert (followed.run_id, control.start.called) == (7, False)


@pytest.mark.parametrize(
    "known", [RunStatus("finished:failed"), RunStatus("finished:stopped"), None]
)
def test_a_new_run_resumes_one_that_broke_off(tmp_path, known):
    write_rows(tmp_path / "metrics.jsonl", ROWS)
    (tmp_path / "log.txt").write_text("of run 7\n")
    control, followed = resume(tmp_path, known)
    assert (followed.run_id, followed.server_folder) == (8, "/srv/x")
    assert followed.log_begins == len("of run 7\n")
    assert read_record(tmp_path) == followed
    words, code = control.start.call_args.args
    assert code == ()
    assert "results_dir='/srv/x'" in words
    assert "resume=false" not in words


def test_the_server_app_finds_out_whether_a_run_had_begun(tmp_path):
    """The launcher may have left before the first row came, or the run ended without one."""
    for rows in ([], ROWS[:1]):
        write_rows(tmp_path / "metrics.jsonl", rows)
        control, _ = resume(tmp_path, RunStatus("finished:stopped"))
        words = control.start.call_args.args[0]
        assert words[0] == "resume=true"
        assert "runtime.server_results='/srv'" in words
        assert "resume=false" not in words


def test_a_completed_run_goes_on_to_a_later_round(tmp_path):
    control, _ = resume(tmp_path, RunStatus("finished:completed"), rounds=5)
    assert control.start.called


@pytest.mark.parametrize(
    "values", [{"target_accuracy": 0.9}, {"early_stopping.patience": 9}, {"evaluation.every": 2}]
)
def test_a_completed_run_goes_on_by_another_rule(values, tmp_path):
    control = superlink()
    launched = recipe(results_dir=str(tmp_path))
    submit(launched, tmp_path, control)
    control.status.return_value = RunStatus("finished:completed")
    for _ in range(2):  # with its own recipe it is followed
        submit(launched, tmp_path, control)
        assert control.start.call_count == 1
    submit(recipe(results_dir=str(tmp_path), **values), tmp_path, control)
    assert control.start.call_count == 2
    control.status.return_value = RunStatus("running")
    with refused("target_accuracy", "early_stopping", kind=LaunchError):
        submit(launched, tmp_path, control)


@pytest.mark.parametrize("ending", ["finished:failed", "finished:completed"])
def test_an_old_summary_is_not_taken_for_that_of_a_run_that_died(ending, tmp_path):
    summary = tmp_path / "summary.json"
    summary.write_text("{}")
    os.utime(summary, (1, 1))
    run: Any = DeploymentRun(recipe().runtime, tmp_path / "log.txt")
    run._record, run._log = RunRecord("t", 7, "/there", "s:1", "r", 3, 0, ""), Mock()
    run._log.events.start = {"token": "t"}  # the server writes to this folder
    run._status = RunStatus(ending)
    run._collect_results()
    assert (summary.stat().st_mtime > 1) == (ending == "finished:completed")


def test_rows_that_a_resumed_run_has_dropped_go_with_its_summary(tmp_path):
    write_rows(tmp_path / "metrics.jsonl", [{"round": t} for t in range(6)])
    run: Any = DeploymentRun(recipe().runtime, tmp_path / "log.txt")
    run._record, run._log = RunRecord("t", 7, "/there", "s:1", "r", 3, 0, ""), Mock()
    rows = [{"round": t} for t in range(4)]
    run._log.events = SimpleNamespace(start={"config": {}}, rows=rows, summary={"rounds": 3})
    run._status = RunStatus("finished:completed")
    run._collect_results()
    assert read_rows(tmp_path / "metrics.jsonl") == rows


def test_the_reason_of_a_failure_is_flowers_or_else_the_end_of_the_log(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("INFO: [round 1/3]\nERROR: Exit Code: 201\n")
    run: Any = DeploymentRun(recipe().runtime, log)
    run._record, run._log = RunRecord("t", 7, "/there", "s:1", "r", 3, 0, ""), Mock()
    run._status = RunStatus("finished:failed", "ServerApp failed with exception: no")
    assert run.failure() == "run 7: ServerApp failed with exception: no"
    run._status = RunStatus("finished:stopped")
    assert run.failure() == "run 7: finished:stopped: INFO: [round 1/3]\nERROR: Exit Code: 201"


@pytest.mark.parametrize("there", [None, "/results"])
def test_a_server_that_cannot_write_to_the_launchers_path_needs_server_results(tmp_path, there):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    with pytest.raises(ConfigError) as refused:
        writable_folder(folder)
    runtime = recipe(**{"runtime.server_results": there}).runtime
    run: Any = DeploymentRun(runtime, folder / "log.txt")
    run._record, run._log = RunRecord("t", 7, "/there", "s:1", "r", 3, 0, ""), Mock()
    run._status = RunStatus("finished:failed", str(refused.value))
    assert ("runtime.server_results is not set" in run.failure()) == (there is None)


@pytest.mark.parametrize(
    ("known", "values", "message"),
    [
        (RunStatus("running"), {"rounds": 5}, "rounds=5 7 rounds=3"),
        (RunStatus("running"), {"local.lr": 0.3}, "7"),
        (None, OTHER, "SuperLink 127.0.0.1:8000"),
    ],
)
def test_a_run_that_cannot_be_resumed_so_is_refused(tmp_path, known, values, message):
    with refused(*message.split(), kind=LaunchError):
        resume(tmp_path, known, **values)


def test_a_run_that_is_not_accepted_leaves_the_folder_unchanged(tmp_path):
    def refuse(words: list[str], code: tuple[Path, ...]) -> int:
        assert read_record(tmp_path)
        raise LaunchError("no")

    control = superlink()
    control.start.side_effect = refuse
    with refused(kind=LaunchError):
        submit(recipe(results_dir=str(tmp_path)), tmp_path, control)
    assert not list(tmp_path.iterdir())
    before = run_7()
    before.write(tmp_path)
    control.status.return_value = RunStatus("finished:completed")
    with refused(kind=LaunchError):
        submit(recipe(results_dir=str(tmp_path), rounds=5), tmp_path, control)
    assert read_record(tmp_path) == before


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let Ctrl-C interrupt: in the background a shell makes processes that ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_while_a_run_is_submitted_waits_for_its_id(tmp_path, capsys):
    def start(words: list[str], code: tuple[Path, ...]) -> int:
        signal.raise_signal(signal.SIGINT)
        return 8

    control = superlink()
    control.start.side_effect = start
    launched = recipe(**{"results_dir": str(tmp_path), "runtime.stop_on_interrupt": True})
    run: Any = DeploymentRun(launched.runtime, tmp_path / "log.txt")
    run._control, run._temporary = control, tmp_path / "temporary"
    try:
        run.submit(launched, [])
    except KeyboardInterrupt as error:
        run.__exit__(type(error))
    assert read_record(tmp_path).run_id == 8
    control.stop.assert_called_once_with(8)
    assert "Ctrl-C again" in capsys.readouterr().err
    assert run.interrupted() == "stopped, and run 8 with it (runtime.stop_on_interrupt)"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("ending", [Unreachable("flwr run got no answer for 120 s"), None])
def test_a_submission_that_nobody_answers_is_in_doubt_and_can_be_repeated(ending, tmp_path):
    def start(words: list[str], code: tuple[Path, ...]) -> int:
        if ending is not None:
            raise ending
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the user does not wait
        raise AssertionError

    control = superlink()
    control.start.side_effect = start
    launched = recipe(results_dir=str(tmp_path))
    run: Any = DeploymentRun(launched.runtime, tmp_path / "log.txt")
    run._control = control
    with pytest.raises((LaunchError, KeyboardInterrupt)) as raised:
        run.submit(launched, [])
    said = str(raised.value) if ending is not None else run.interrupted()
    assert "The SuperLink may have the run" in said
    first = read_record(tmp_path)
    control = superlink()
    followed = submit(recipe(results_dir=str(tmp_path), resume=True), tmp_path, control)
    assert (followed.token, followed.server_folder) == (first.token, first.server_folder)
    assert (first.run_id, followed.run_id, control.status.called) == (0, 8, False)


def test_a_sweep_resumes_a_job_whose_checkpoints_are_elsewhere(tmp_path):
    RunRecord("t", 7, "/srv/x", "s:1", resume_fingerprint(recipe()), 3, 0, "").write(tmp_path)
    assert plan_for(tmp_path, recipe()) is Plan.CONTINUE
    with refused(str(tmp_path), kind=FolderTaken):
        plan_for(tmp_path, recipe(**{"local.lr": 0.3}))


def test_a_fetched_model_must_have_the_runs_parameters(monkeypatch, tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    here.mkdir()
    there.mkdir()
    (there / "model.safetensors").write_bytes(b"cut off")
    fetching = recipe(**{"runtime.fetch": "cp -R {server}/. {here}"})
    run: Any = DeploymentRun(fetching.runtime, here / "log.txt")
    run._record = RunRecord("t", 7, str(there), "s:1", "r", 3, 0, "")
    run._log = Mock()
    monkeypatch.setattr(run_module, "_is_the_model", lambda path, _: path.read_bytes() == b"whole")
    with refused("model.safetensors", "resume=true", kind=LaunchError):
        run._fetch_results({})
    said = r"sh -c 'printf caf\\351 >&2; exit 23' {server} {here}"  # Latin-1
    latin: Any = DeploymentRun(recipe(**{"runtime.fetch": said}).runtime, here / "log.txt")
    latin._record, latin._log = run._record, run._log
    with refused("23", kind=LaunchError):
        latin._fetch_results({})
    (there / "model.safetensors").write_bytes(b"whole")
    run._fetch_results({})
    assert [path.name for path in here.iterdir()] == ["model.safetensors"]

"""fedhet-watch over a run that goes on."""

import http.client
import signal
import subprocess
import sys
import threading
import time

import pytest

from fedhet.report.live import ADDRESS, LivePage, main, server_of
from tests.finished_runs import no_pictures, write_run
from tests.processes import SECONDS, Fork
from tests.refused import refused

__all__ = ["no_pictures", "write_run"]


@pytest.fixture
def serve():
    """Return a function that serves folders and returns what answers ``(method, path, host)``."""
    servers = []

    def start(*sources):
        server = server_of(LivePage(sources), 0)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def ask(path="/", method="GET", host=""):
            connection = http.client.HTTPConnection(ADDRESS, server.server_port, timeout=60)
            host = (
                host.replace("PORT", str(server.server_port)) or f"{ADDRESS}:{server.server_port}"
            )
            connection.request(method, path, headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        return ask

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_only_the_page_is_served_to_a_browser_of_this_machine(write_run, tmp_path, serve):
    write_run()
    (tmp_path / "sweep" / "secret").write_text("it is a secret")
    ask = serve(tmp_path / "sweep")
    assert ask()[0] == ask(host="localhost:PORT")[0] == 200
    assert "window.vegaEmbed=" in ask("/vega.js")[1]
    for host in ("evil.example:PORT", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil.example:PORT"):
        assert ask(host=host)[0] == 403
    for path in ("/secret", "/../secret", "//secret", "/%2e%2e/secret", "/?", "/version/../secret"):
        status, text = ask(path)
        assert (status, "it is" in text) == (404, False)
    assert {ask(method=method)[0] for method in ("POST", "PUT", "DELETE", "HEAD")} == {501}


def test_a_run_is_running_while_it_writes_if_half_a_line_and_if_it_was_resumed(
    write_run, tmp_path, serve, monkeypatch
):
    folder = write_run(name="run")
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "accuracy": 0.9')
    ask = serve(tmp_path / "sweep")
    assert "FedAvg, seed 0: running, accuracy 50.0 % after round 3." in ask()[1]
    before = ask("/version")[1]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("9}\n")
    assert ask("/version")[1] != before
    assert "running, accuracy 99.0 % after round 4." in ask()[1].replace("0.99", "")
    resumed = write_run(seed=1, summary={"status": "stopped", "error": "by Ctrl-C"})
    assert "FedAvg, seed 1: stopped, accuracy" in ask()[1]
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "accuracy": 0.7, "seconds": 1.0}\n')
    assert "FedAvg, seed 1: running, accuracy 70.0 % after round 4." in ask()[1]
    monkeypatch.setattr("fedhet.report.live.SILENT_SECONDS", -1.0)
    assert "unfinished, accuracy" in serve(tmp_path / "sweep")()[1]


@pytest.mark.flower
def test_a_page_follows_a_real_run_from_before_its_start_to_its_end(tmp_path, serve):
    ask, seen = serve(tmp_path), set()
    assert "No run has begun" in ask()[1]
    words = ("runtime=local", "rounds=12", f"results_dir={tmp_path}/run", "local.epochs=2")
    with Fork(tmp_path, *words) as launched:
        version, end = "", time.monotonic() + SECONDS
        while time.monotonic() < end:
            over = launched.poll() is not None
            if (now := ask("/version")[1]) != version:
                version = now
                status, text = ask()
                assert status == 200
                seen |= {word for word in ("No run", ": running,", "completed;") if word in text}
            if over:
                break
            time.sleep(0.05)
    assert launched.returncode == 0
    assert "FedAvg: final accuracy" in ask()[1]
    assert ": running," in seen


@pytest.mark.flower
def test_ctrl_c_ends_the_command_without_a_traceback(write_run, tmp_path):
    write_run()
    code = "from fedhet.report.live import main; main()"
    words = [sys.executable, "-c", code, str(tmp_path / "sweep"), "--port", "0"]
    with subprocess.Popen(words, stdout=-1, stderr=-1, text=True) as watch:
        assert watch.stdout.readline().startswith("live     http://127.0.0.1:")
        watch.send_signal(signal.SIGINT)
        _, errors = watch.communicate(timeout=60)
    assert (watch.returncode, errors.strip()) == (130, "fedhet-watch: stopped")


def test_a_wrong_folder_or_port_is_said(tmp_path, capsys):
    with refused("nowhere"):
        LivePage([tmp_path / "nowhere"])
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--port", "70000"])
    assert "70000 must lie in [0, 65536)" in capsys.readouterr().err

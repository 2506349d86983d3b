"""common/flower/fork_executor.py: what a forked app has and leaves, beside one that Flower starts.

Flower's own executor launches, in a process of its own; what it launches is a probe, which a
package that calls itself flwr gives as `flwr-clientapp`. test_deployment.py has the real one.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fedhet.common import flower
from tests.processes import SECONDS, alive

FLOWER = Path(flower.__file__).parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

# An executor: each line of its input is the token of an app, and whether it is heard.
EXECUTOR = """
import json, os, sys
if sys.argv[1] == "forks":
    sys.path.insert(0, sys.argv[2])
    import fork_executor
    fork_executor.install()
    sys.path.pop(0)
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import ExecutionSpec
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
for line in sys.stdin:
    token, quiet = json.loads(line)
    SubprocessExecutor().launch(ExecutionSpec(
        TaskType.CLIENT_APP, "127.0.0.1:1", token, True, None, False, os.getpid(), quiet, 1))
"""
# An app: the token says what it does. It writes what it sees to a file of the token's name.
PROBE = """
import atexit, json, os, random, resource, signal, sys, threading, time
kept = []
def opens(process):
    try:
        open(f"/proc/{process}/mem", "rb").close()
    except OSError:
        return False
    return True
def main():
    token = sys.argv[sys.argv.index("--token") + 1]
    import numpy, torch
    seen = {
        "argv": [os.path.basename(sys.argv[0]), *sys.argv[1:-1]],
        "path": sys.path, "environment": dict(os.environ), "folder": os.getcwd(),
        "signals": {s.name: str(signal.getsignal(s)) for s in signal.valid_signals()
                    if isinstance(s, signal.Signals)},
        "files": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
        "group": [os.getpgid(0), os.getsid(0)],
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "threads": len(os.listdir("/proc/self/task")),
        "torch": [torch.get_num_threads(), torch.cuda.is_initialized()],
        "nice": os.nice(0), "opens": opens(os.getpid()),
    }
    own = {"pid": os.getpid(), "kept": list(kept), "parent": os.getppid(),
           "executor": int(sys.argv[-1]), "opens_parent": opens(os.getppid()),
           "fedhet": [name for name in sys.modules if name.split(".")[0] == "fedhet"],
           "random": [random.random(), float(numpy.random.random()), torch.initial_seed()]}
    kept.append(token)
    os.environ["LEFT_BEHIND"] = torch.left_behind = token
    if token == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    print("printed by", token, flush=True)
    sys.stderr.write(f"complained by {token}\\n")
    with open(f"{token}.part", "w") as file:
        json.dump([seen, own], file)
    os.rename(f"{token}.part", token)
    if token == "ends":
        if (child := os.fork()) == 0:
            sys.exit(3)
        with open("status", "w") as file:
            file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        kept.append(open("open", "w"))
        kept[-1].write("written out")
        atexit.register(lambda: open("atexit", "w").write("called"))
        def thread():
            time.sleep(0.5)
            open("thread", "w").write("awaited")
            print("said at the end")
        threading.Thread(target=thread).start()
    if token == "stay":
        from flwr.supercore.app_utils import start_parent_process_monitor
        start_parent_process_monitor(own["executor"])
        while True:
            time.sleep(0.1)
"""


PR_CAPBSET_DROP, CAP_SYS_PTRACE = 24, 19


def until(done: Callable[[], object], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def as_an_ordinary_user() -> None:
    """Be as in a container, or in a terminal: root may look into all processes.

    SIGINT ends it, also where these tests run in a shell's background, which ignores it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0)


class Executor:
    """A running EXECUTOR, in a folder with the probe in place of flwr-clientapp."""

    def __init__(self, folder: Path, way: str) -> None:
        self.folder = folder
        installed, commands = folder / "installed", folder / "bin"
        for one in (installed / "flwr-1.39.0.dist-info", commands):
            one.mkdir(parents=True)
        metadata = installed / "flwr-1.39.0.dist-info"
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flwr\nVersion: 1.39.0\n")
        (metadata / "entry_points.txt").write_text(
            "[console_scripts]\nflwr-clientapp = probe:main\nflwr-serverapp = probe:main\n"
        )
        (installed / "probe.py").write_text(PROBE)
        script = commands / "flwr-clientapp"
        script.write_text(f"#!{sys.executable}\nimport probe\nprobe.main()\n")
        script.chmod(0o755)
        self.output = folder / "output"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", EXECUTOR, way, str(FLOWER)],
                cwd=folder,
                env={
                    "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
                    "PYTHONPATH": str(installed),
                    "OMP_NUM_THREADS": "1",
                },
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=as_an_ordinary_user,
            )

    def launch(self, token: str, *, quiet: bool = False) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps([token, quiet]).encode() + b"\n")
        self.process.stdin.flush()

    def seen(self, token: str, *, quiet: bool = False) -> list[dict[str, Any]]:
        """Launch an app; return what it saw, and what is its alone."""
        self.launch(token, quiet=quiet)
        until((self.folder / token).exists, f"{token}: {self.said()}")
        found: list[dict[str, Any]] = json.loads((self.folder / token).read_text())
        return found

    def said(self) -> str:
        return self.output.read_text()

    def server(self) -> psutil.Process:
        until(self._servers, "no fork server starts")
        (server,) = self._servers()
        return server

    def _servers(self) -> list[psutil.Process]:
        found = []
        for one in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # a zombie, or gone meanwhile
                found += [one] if "fork_executor.py" in " ".join(one.cmdline()) else []
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    executor = Executor(tmp_path_factory.mktemp("forks"), "forks")
    yield executor
    executor.close()


@pytest.mark.slow
def test_a_forked_app_sees_what_one_sees_that_flower_starts(forks, tmp_path):
    plain = Executor(tmp_path / "plain", "plain")
    try:
        (expected, one), (found, own) = plain.seen("same"), forks.seen("same")
    finally:
        plain.close()
    assert (one["executor"], own["executor"]) == (plain.process.pid, forks.process.pid)
    assert expected["opens"]
    here, there = str(forks.folder), str(plain.folder)
    assert json.loads(json.dumps(found).replace(here, there)) == expected
    assert own["parent"] == forks.server().pid
    assert own["fedhet"] == []  # it comes with the run


@pytest.mark.slow
def test_each_message_has_a_process_of_its_own_and_nothing_is_kept(forks):
    (_, first), (seen, second) = forks.seen("first"), forks.seen("second")
    assert first["pid"] != second["pid"]
    assert second["kept"] == []
    assert "LEFT_BEHIND" not in seen["environment"]
    assert not set(first["random"]) & set(second["random"])
    until(lambda: not psutil.pid_exists(first["pid"]), "a zombie is left")


@pytest.mark.slow
def test_the_output_goes_to_the_executors_log_or_nowhere(forks):
    forks.seen("loud")
    until(lambda: "complained by loud" in forks.said(), forks.said())
    assert "printed by loud" in forks.said()
    forks.seen("quiet", quiet=True)
    forks.seen("later")
    until(lambda: "complained by later" in forks.said(), forks.said())
    assert "by quiet" not in forks.said()


@pytest.mark.slow
def test_an_app_ends_as_python_ends(forks):
    _, own = forks.seen("ends")
    until(lambda: not psutil.pid_exists(own["pid"]), "it does not end")
    files = {"open": "written out", "atexit": "called", "thread": "awaited", "status": "3"}
    assert {name: (forks.folder / name).read_text() for name in files} == files
    assert "said at the end" in forks.said()


@pytest.mark.slow
def test_a_crash_costs_one_app_and_a_dead_server_its_speed(forks):
    server = forks.server()
    forks.launch("crash")
    _, own = forks.seen("after a crash")
    assert own["parent"] == server.pid
    assert "WARNING" not in forks.said()
    server.kill()
    _, own = forks.seen("without a server")
    assert own["parent"] == forks.process.pid
    assert "WARNING: the fork server does not answer" in forks.said()
    _, own = forks.seen("with another server")
    assert own["parent"] == forks.server().pid != server.pid


@pytest.mark.slow
def test_server_and_apps_end_with_the_executor_and_the_server_is_closed_to_others(forks):
    _, own = forks.seen("stay")
    left = [forks.server(), psutil.Process(own["pid"])]
    assert not own["opens_parent"]  # what it changed there, the next run would be forked with
    left[0].send_signal(signal.SIGINT)  # Ctrl-C reaches it, too
    assert len(alive(left)) == 2
    forks.close()
    _, still = psutil.wait_procs(left, timeout=30)
    assert alive(still) == []


# ---- another Flower ------------------------------------------------------------------------------


def module() -> Any:
    spec = importlib.util.spec_from_file_location("fork_executor", FLOWER / "fork_executor.py")
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_another_flower_keeps_its_own_executor_with_a_warning(monkeypatch, capsys):
    from flwr.supercore.superexec.executor import subprocess_executor

    other = SimpleNamespace(Popen=None)
    monkeypatch.setattr(subprocess_executor, "subprocess", other)
    module().install()
    assert subprocess_executor.subprocess is other
    said = capsys.readouterr().err
    assert said == textwrap.dedent(
        """\
        WARNING: flwr.supercore.superexec.executor.subprocess_executor starts its processes in \
another way than Flower 1.39's: every message imports torch anew, about 3 s of CPU time
        """
    )
    monkeypatch.undo()
    fork_executor = module()
    assert fork_executor.unexpected(subprocess_executor) is None
    monkeypatch.setattr(fork_executor, "COMMANDS", ("flwr-clientapp", "flwr-nothing"))
    assert fork_executor.unexpected(subprocess_executor) == "Flower has no command flwr-nothing"


# ---- a run's bundle ------------------------------------------------------------------------------


def test_a_bundle_is_unpacked_once_and_again_if_its_copy_has_gone(monkeypatch, tmp_path):
    unpacked: list[bytes] = []

    def install_from_fab(fab: bytes, skip_prompt: bool = False) -> Path:
        assert skip_prompt
        unpacked.append(fab)
        folder = tmp_path / "apps" / fab.decode()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    flowers = SimpleNamespace(install_from_fab=install_from_fab)
    module().install_once(flowers)
    for fab in (b"first", b"second", b"first", b"second"):
        assert flowers.install_from_fab(fab, skip_prompt=True) == tmp_path / "apps" / fab.decode()
    assert unpacked == [b"first", b"second"]
    (tmp_path / "apps" / "first").rmdir()
    flowers.install_from_fab(b"first", skip_prompt=True)
    assert unpacked == [b"first", b"second", b"first"]
    assert len(list((tmp_path / "installed").iterdir())) == 2


# ---- what a site's policy lets run ---------------------------------------------------------------


def test_only_the_bundles_of_the_policy_are_unpacked_or_the_sites_own_copy_runs(
    monkeypatch, tmp_path
):
    path, own = tmp_path / "policy.yaml", tmp_path / "own"
    flowers = SimpleNamespace(
        install_from_fab=lambda fab, **options: "unpacked",
        get_load_client_app_fn=lambda *rest, **options: lambda *run: "the bundle's app",
        LoadClientAppError=RuntimeError,
    )
    fork_executor = module()
    fork_executor.pin(flowers)

    def runs(bundle: bytes) -> tuple[object, object]:
        unpacked = flowers.install_from_fab(bundle, skip_prompt=True)
        return unpacked, flowers.get_load_client_app_fn("", None, True)("id", "1", "hash")

    assert runs(b"any") == ("unpacked", "the bundle's app")
    monkeypatch.setenv("FEDHET_POLICY", str(path))
    with pytest.raises(OSError, match=r"policy\.yaml"):
        runs(b"any")
    path.write_text("rounds: 3")
    assert runs(b"any") == ("unpacked", "the bundle's app")
    path.write_text(f"bundles: [{hashlib.sha256(b'known').hexdigest()}]")
    assert runs(b"known") == ("unpacked", "the bundle's app")
    with pytest.raises(PermissionError, match=hashlib.sha256(b"any").hexdigest()):
        runs(b"any")
    (own / "own_app").mkdir(parents=True)
    (own / "own_app" / "__init__.py").write_text("app = 'the own app'")
    monkeypatch.setattr(fork_executor, "OWN_APP", "own_app:app")
    monkeypatch.setattr(sys, "path", [*sys.path])
    path.write_text(f"own_code: {own}")
    assert runs(b"any") == (None, "the own app")


def test_what_nobody_compares_is_not_started_beside_a_policy_of_the_code(
    monkeypatch, tmp_path, capsys
):
    started: list[list[str]] = []
    fork_executor, path = module(), tmp_path / "policy.yaml"
    monkeypatch.setattr(fork_executor.subprocess, "Popen", started.append)
    fork_executor.start_unforked(["flwr-other"])
    monkeypatch.setenv("FEDHET_POLICY", str(path))
    path.write_text("bundles: []")
    fork_executor.start_unforked(["flwr-other"])
    assert started == [["flwr-other"]]
    assert "flwr-other is not started" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="policy"):  # another Flower
        fork_executor.pin(SimpleNamespace(__name__="run_clientapp"))

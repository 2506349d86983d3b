"""Issue: every message costs 3 s of CPU time, because each one's process imports torch anew.

Flower's SuperExec starts `flwr-clientapp` and `flwr-serverapp` as commands, and each of them
imports Flower and torch: 3 s of CPU time for every message. This file, run as a program, is a
separate process from which they are forked. It has imported installed packages and nothing else: it
has no code of a run, no connection, no thread, no GPU, no secret. What an app does ends with its
process.

An app has what Flower's executor gives it: arguments, environment, working folder, standard
streams, and it ends when the executor ends. `ps` no longer shows its token, and its exit status,
which nobody reads, is 0.

Flower unpacks and verifies a run's bundle for every message, and then uses the copy that the first
message has installed. Here a message uses an installed bundle at once (`install_once`).

A site's policy (FEDHET_POLICY) may name the bundles that can run, or the site's own copy of fedhet,
which then runs in place of any bundle (`pin`). Then no other code of a run is started here.

Mends: the name `subprocess` in `flwr.supercore.superexec.executor.subprocess_executor`, and
`install_from_fab` and `get_load_client_app_fn` in `flwr.supernode.runtime.run_clientapp`.
Releases: 1.39 to 1.42. With another Flower only the speed is lost, and beside a policy of the code
nothing runs. Not needed, but for the policy, when Flower forks its apps itself:
`tests/drills/test_fork_executor.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import hashlib
import importlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

COMMANDS = ("flwr-clientapp", "flwr-serverapp")
# What fedhet's apps import before the end of a round; nothing here is a run's own code.
PRELOAD = (
    "flwr.clientapp",
    "flwr.serverapp",
    "hydra",
    "pydantic.main",
    "safetensors.torch",
    "torch",
)
OWN_APP = "fedhet.client_app.app:app"
WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
PR_SET_DUMPABLE = 4
SECONDS = 60.0  # the longest wait for a fork: the first one waits for the imports


# ---- in the SuperExec ----------------------------------------------------------------------------


def install() -> None:
    """Let Flower's executor fork its processes; if Flower is another than expected, say so."""
    from flwr.supercore.superexec.executor import subprocess_executor as flowers

    if problem := unexpected(flowers):
        if pins():
            sys.exit(f"{problem}, so this executor cannot compare bundles, as the policy says")
        say(f"{problem}: every message imports torch anew, about 3 s of CPU time")
        return
    vars(flowers)["subprocess"] = ForkServer()


def unexpected(module: ModuleType) -> str | None:
    """Say what this file misses in Flower's module; None if nothing is missing."""
    if getattr(module, "subprocess", None) is not subprocess:
        return f"{module.__name__} starts its processes in another way than Flower 1.39's"
    missing = [name for name in COMMANDS if not entry_points(group="console_scripts", name=name)]
    return f"Flower has no command {missing[0]}" if missing else None


class ForkServer:
    """Replaces the module subprocess in Flower's executor."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self) -> None:
        self._start()

    def Popen(self, command: Sequence[str], **streams: Any) -> None:
        """Fork a command, or start it in the ordinary way if the server does not have it."""
        quiet = {"stdout": self.DEVNULL, "stderr": self.DEVNULL}
        if command[0] not in COMMANDS or streams not in ({}, quiet):
            start_unforked(command, **streams)
            return
        try:
            self._fork({"command": list(command), "quiet": streams == quiet})
        except OSError as error:
            say(f"the fork server does not answer ({error}): this message imports torch anew")
            start_unforked(command, **streams)
            self._process.kill()
            self._process.wait()
            self._near.close()
            self._start()

    def _start(self) -> None:
        self._near, far = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._near.settimeout(SECONDS)
        with far:
            words = [sys.executable, __file__, str(far.fileno())]
            self._process = subprocess.Popen(words, pass_fds=[far.fileno()])

    def _fork(self, order: dict[str, Any]) -> None:
        self._near.sendall(json.dumps(order).encode())
        if not self._near.recv(64):
            raise ConnectionError("it has ended")


def start_unforked(command: Sequence[str], **streams: Any) -> None:
    """Start a command as Flower does, unless a policy says what may run: nothing compares it."""
    if pins():
        say(f"{command[0]} is not started: the site's policy names the code that may run")
        return
    subprocess.Popen(command, **streams)


def pins() -> dict[str, Any]:
    """Return what the site's policy says of the code that may run here; empty for any code.

    Raises:
        OSError, yaml.YAMLError, AttributeError: if the file cannot be read.
    """
    if not (path := os.environ.get("FEDHET_POLICY")):
        return {}
    import yaml

    rules = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    found = {name: rules.get(name) for name in ("bundles", "own_code")}
    return {name: value for name, value in found.items() if value is not None}


def say(text: str) -> None:
    """Print a warning."""
    sys.stderr.write(f"WARNING: {text}\n")
    sys.stderr.flush()


# ---- the fork server -----------------------------------------------------------------------------


def main() -> None:
    """Import, then fork for each order until the SuperExec ends; a fork becomes its command."""
    apps: list[int] = []
    atexit.register(leave, apps)  # before anything else registers, so that it is called last
    orders = socket.socket(fileno=int(sys.argv[1]))
    set_dumpable(False)
    del sys.path[0]  # this file's folder
    programs = {name: program(name) for name in COMMANDS}
    runtime = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    install_once(runtime)
    pin(runtime)
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all these pages
    order = next_fork(orders)
    if order is not None:
        apps.append(os.getpid())
        become(order, programs)


def leave(apps: Sequence[int]) -> None:
    """End an app without taking torch apart, which would cost .4 s of CPU time per fork.

    Threads and atexit functions have ended; open files are written out. A process that the app
    itself has forked ends in Python's way, with its own exit status.
    """
    if os.getpid() not in apps:
        return
    opened = [one for one in gc.get_objects() if type(one) in WRITERS]  # since the fork
    for one in (*opened, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):  # closed, or its disk is full
            one.flush()
    os._exit(0)


def set_dumpable(allowed: bool) -> None:
    """Let processes of the same user write into this one, or not.

    Flower's SuperExec does the same: what one run changes here, the next run would inherit.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, int(allowed), 0, 0, 0)


def program(name: str) -> Callable[[], object]:
    """Return the function that an installed command runs."""
    (found,) = entry_points(group="console_scripts", name=name)
    loaded: Callable[[], object] = found.load()
    return loaded


def install_once(module: ModuleType) -> None:
    """Let Flower's ClientApp process unpack a bundle for a site's first message only.

    Flower unpacks a bundle, verifies the files, and then returns the installed copy if there is
    one. A note named after the bundle's SHA-256 says that this is done. It is written last, so that
    no message uses an unfinished copy.
    """
    from flwr.supercore.utils import get_flwr_home

    install = getattr(module, "install_from_fab", None)
    if install is None:  # another release of Flower
        return

    def install_if_new(fab: bytes, *rest: Any, **options: Any) -> Path:
        note = get_flwr_home() / "installed" / hashlib.sha256(fab).hexdigest()
        with contextlib.suppress(OSError):
            if (folder := Path(note.read_text())).is_dir():
                return folder
        installed: Path = install(fab, *rest, **options)
        note.parent.mkdir(parents=True, exist_ok=True)
        part = note.with_suffix(f".{os.getpid()}")
        part.write_text(str(installed))
        part.replace(note)
        return installed

    vars(module)["install_from_fab"] = install_if_new


def pin(module: ModuleType) -> None:
    """Let Flower's ClientApp process run only the code that the site's policy names."""
    parts = vars(module)
    if not {"install_from_fab", "get_load_client_app_fn"} <= parts.keys():  # another Flower
        if pins():
            sys.exit(f"{module.__name__} is not Flower 1.39's: it cannot be held to the policy")
        return
    install, loader = parts["install_from_fab"], parts["get_load_client_app_fn"]

    def install_if_allowed(fab: bytes, *rest: Any, **options: Any) -> object:
        rules, bundle = pins(), hashlib.sha256(fab).hexdigest()
        if "bundles" in rules and bundle not in rules["bundles"]:
            raise PermissionError(f"the site's policy forbids the bundle {bundle} (bundles)")
        return None if "own_code" in rules else install(fab, *rest, **options)

    def loader_of_own(*rest: Any, **options: Any) -> Callable[..., object]:
        if folder := pins().get("own_code"):
            from flwr.supercore.object_ref import load_app

            return lambda *run: load_app(OWN_APP, parts["LoadClientAppError"], folder)
        found: Callable[..., object] = loader(*rest, **options)
        return found

    parts["install_from_fab"], parts["get_load_client_app_fn"] = install_if_allowed, loader_of_own


def next_fork(orders: socket.socket) -> dict[str, Any] | None:
    """Fork for every order; return it in the fork, and None in the server when the orders end."""
    # Ctrl-C is for the SuperExec and the apps.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets ended forks
    while order := orders.recv(1 << 16):
        if os.fork() == 0:
            orders.close()
            set_dumpable(True)
            signal.signal(signal.SIGINT, before)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            loaded: dict[str, Any] = json.loads(order)
            return loaded
        with contextlib.suppress(OSError):  # the SuperExec has ended meanwhile
            orders.send(b"forked")
    return None


def become(order: dict[str, Any], programs: dict[str, Callable[[], object]]) -> None:
    """Run a command as its own script would, with its own random numbers."""
    import numpy as np
    import torch

    name = order["command"][0]
    if os.environ.get("FEDHET_POLICY"):
        os.environ["FEDHET_PINNED"] = "1"  # its rules of the code count here (client_app/policy.py)
    if order["quiet"]:
        with open(os.devnull, "r+b") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as shown:
        shown.write(name)  # in ps and top
    np.random.seed()  # noqa: NPY002  Python's own generator is seeded anew by os.fork
    torch.default_generator.seed()
    sys.argv = [shutil.which(name) or name, *order["command"][1:]]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    sys.exit(programs[name]())  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

"""The image and docker/'s compose files in a real Docker Engine.

Skipped where no engine answers. test_containers_readme.py types docker/README.md's commands;
container_faults.py has the drills.
"""

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from threading import Thread

import pytest

from fedhet.common.flower.line import installed_release
from tests.compose import DOCKER
from tests.deployed import SITES
from tests.drills.containers import (
    IMAGE,
    MARKS,
    Containers,
    build_changed,
    docker,
    image_of_this_clone,
    inspect,
)
from tests.drills.faults import replies
from tests.drills.scene import Scene
from tests.test_packaging import pinned

pytestmark = MARKS
PROGRAMS = (
    "superlink",
    "gate",
    "serverapp",
    *(f"{one}-{n}" for n in SITES for one in ("supernode", "clientapp")),
)
EVERY = ("network", *PROGRAMS)


@pytest.fixture(scope="module")
def image() -> str:
    return image_of_this_clone()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, image: str) -> Iterator[Containers]:
    with Containers(tmp_path_factory.mktemp("federation")) as containers:
        yield containers
    assert containers.left() == []


# ---- the image -----------------------------------------------------------------------------------


def test_the_image_says_what_it_is_and_lists_its_packages(image):
    settings = inspect(image)["Config"]
    assert settings["User"] == "1000:1000"
    assert settings["Labels"]["org.opencontainers.image.title"] == "fedhet"
    program = """
import importlib.metadata, json
listed = json.load(open("/opt/venv/sbom.cdx.json"))["components"]
print(json.dumps([{one["name"].lower().replace("_", "-"): one["version"] for one in listed},
    {one.name.lower().replace("_", "-"): one.version for one in importlib.metadata.distributions(
        path=["/opt/venv/lib/python3.%d/site-packages" % __import__("sys").version_info[1]])}]))
"""
    listed, installed = eval(docker("run", "--rm", "--entrypoint=python", image, "-c", program))
    assert listed == installed
    pins = pinned(installed_release())
    assert {name: pins.get(name, listed[name]) for name in listed} == listed
    assert {"torch", "flwr"} <= listed.keys()


def test_a_change_of_code_is_one_small_layer_and_seconds(image, tmp_path):
    seconds = build_changed(tmp_path)
    try:
        before, after = (inspect(one)["RootFS"]["Layers"] for one in (image, f"{IMAGE}-changed"))
    finally:
        docker("rmi", f"{IMAGE}-changed")
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]
    assert seconds < 60


@pytest.mark.parametrize("file", sorted(one.name for one in DOCKER.glob("*.gpu.yaml")))
def test_the_engines_compose_gives_the_gpus_to_the_sites_executors_alone(file):
    words = ["-f", str(DOCKER / file.replace(".gpu", "")), "-f", str(DOCKER / file)]
    found = json.loads(docker("compose", *words, "config", "--format", "json"))["services"]
    for name, service in found.items():
        reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {})
        gpus = [one["capabilities"] for one in reserved.get("devices", [])]
        assert gpus == ([["gpu"]] if name.startswith("clientapp") else []), name


# ---- isolation -----------------------------------------------------------------------------------


def inside(federation: Containers, name: str, program: str, *words: str) -> str:
    done = federation.execute(name, "python", "-c", program, *words)
    assert done.returncode == 0, done.stdout
    return done.stdout


def statuses(federation: Containers, name: str) -> list[dict[str, str]]:
    """Return /proc/PID/status of all processes in a container."""
    said = federation.execute(name, "sh", "-c", "cat /proc/[0-9]*/status 2>/dev/null").stdout
    found = re.split(r"^Name:", said, flags=re.MULTILINE)[1:]
    return [dict(re.findall(r"^(\w+):\s*(.*)$", one, re.MULTILINE)) for one in found]


@pytest.mark.parametrize("name", EVERY)
def test_no_process_is_root_has_a_capability_or_can_get_one(federation, name):
    found = statuses(federation, name)
    assert len(found) >= (3 if name.startswith("clientapp") else 1)  # the fork server too
    for one in found:
        assert "0" not in one["Uid"].split()
        assert "0" not in one["Gid"].split()
        for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(one[kind], 16) == 0, kind
        assert one["NoNewPrivs"] == "1"


WRITES = """
import os, sys
for folder in sys.argv[1:]:
    if not os.path.isdir(folder):
        continue
    try:
        open(os.path.join(folder, "new"), "w").close()
    except OSError as error:
        print(folder, error.strerror)
    else:
        os.remove(os.path.join(folder, "new"))
        print(folder, "written")
"""


def writable(federation: Containers, name: str) -> list[str]:
    found = inside(federation, name, "import os; print(*next(os.walk('/'))[1])").split()
    folders = [f"/{one}" for one in found] + [
        "/",
        "/run/secrets",
        "/home/fedhet",
        "/var/tmp",
        "/opt/venv/bin",
    ]
    kernels = ("/proc", "/sys", "/dev")
    said = inside(federation, name, WRITES, *(one for one in folders if one not in kernels))
    lines = [line.partition(" ")[::2] for line in said.splitlines()]
    assert {why for _, why in lines} <= {"Read-only file system", "Permission denied", "written"}
    return sorted(folder for folder, why in lines if why == "written")


@pytest.mark.parametrize(
    ("name", "folders"),
    [
        ("network", ["/tmp"]),
        ("gate", ["/tmp"]),
        ("superlink", ["/state", "/tmp"]),
        ("serverapp", ["/results", "/tmp"]),
        ("supernode-0", ["/tmp"]),
        ("clientapp-0", ["/state", "/tmp"]),
    ],
)
def test_a_container_writes_to_its_own_folder_and_nowhere_else(federation, name, folders):
    """A site's data, the test set and the public keys are mounted read-only."""
    assert writable(federation, name) == folders


REACHES = """
import socket, sys
for target in sys.argv[1:]:
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 3).close()
    except OSError as error:
        continue
    print(target)
"""


def addresses(federation: Containers, name: str) -> dict[str, str]:
    """Return a container's address by network."""
    found = inspect(federation.container(name))["NetworkSettings"]["Networks"]
    return {
        key.removeprefix(f"{federation.project}_"): one["IPAddress"] for key, one in found.items()
    }


def gateways() -> list[str]:
    """Return the addresses of this machine on Docker's networks, and those that it could have."""
    form = "{{range .IPAM.Config}}{{.Gateway}} {{end}}"
    names = docker("network", "ls", "-q", "-f", "driver=bridge").split()
    return docker("network", "inspect", "-f", form, *names).split()


def test_a_sites_code_reaches_its_own_supernode_and_nothing_else(federation):
    """Not the server, another site, a service of the site's machine, or a route out."""
    server = HTTPServer(("0.0.0.0", 0), SimpleHTTPRequestHandler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        others = {**addresses(federation, "network"), **addresses(federation, "supernode-1")}
        targets = [
            f"{address}:{port}" for address in others.values() for port in (8000, 9092, 9094)
        ]
        targets += [f"{own}:9094" for own in addresses(federation, "supernode-0").values()]
        port = server.server_address[1]
        machine = [f"{address}:{port}" for address in {*gateways(), socket.gethostname()}]
        assert inside(federation, "supernode-0", REACHES, *machine)  # so it can be reached at all
        names = ["runtime:9094", "superlink:9092", "supernode-1:9094", "network:8000"]
        found = inside(federation, "clientapp-0", REACHES, *targets, *machine, *names)
    finally:
        server.shutdown()
    mine = addresses(federation, "supernode-0")["site-0"]
    assert found.split() == [f"{mine}:9094", "runtime:9094"]
    routes = inside(federation, "clientapp-0", "print(open('/proc/net/route').read())")
    assert [line.split()[1] for line in routes.splitlines()[1:] if line].count("00000000") == 0


def test_the_keys_are_only_where_they_are_used(federation):
    find = """
import os
for top in ("/run", "/data", "/state", "/results", "/nodes", "/tmp", "/app", "/home", "/etc"):
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            try:
                text = open(path, "rb").read(1 << 20)
            except OSError:
                continue
            if b"PRIVATE KEY-----\\n" in text or "secret" in name:
                print(path)
print(*(name for name in os.environ if "KEY" in name or "SECRET" in name or "TOKEN" in name))
"""
    secret = "/run/secrets/executor.secret"
    for name, expected in {
        "superlink": ["/run/secrets/server.key", secret],
        "gate": ["/run/secrets/server.key"],
        "serverapp": [secret],
        "supernode-0": ["/run/secrets/node.key", secret],
        "clientapp-0": [secret],
        "network": [],
    }.items():
        assert sorted(inside(federation, name, find).split()) == sorted(expected), name


def limited(
    federation: Containers, program: str, **limits: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a container of a ClientApp with limits of the operator's."""
    words = federation.command(
        "run", "--rm", "-T", "--no-deps", "--entrypoint=python", "clientapp-0"
    )
    environment = {**os.environ, **federation.variables, **limits}
    return subprocess.run([*words, "-c", program], env=environment, capture_output=True, text=True)


def test_the_limits_of_memory_processes_and_cpus_hold(federation):
    allocate = "b = bytearray({} << 20); print(len(b) >> 20)"
    assert limited(federation, allocate.format(100), CLIENTAPP_MEMORY="256m").stdout == "100\n"
    assert limited(federation, allocate.format(400), CLIENTAPP_MEMORY="256m").returncode == 137
    processes = """
import os, time
for number in range(600):
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except BlockingIOError:
        break
print(number)
"""
    allowed = int(limited(federation, processes).stdout)
    assert 500 <= allowed < 512
    busy = """
import multiprocessing, time
def work(end):
    while time.monotonic() < end:
        pass
if __name__ == "__main__":
    import resource
    end = time.monotonic() + 4
    jobs = [multiprocessing.Process(target=work, args=(end,)) for _ in range(2)]
    [job.start() for job in jobs]; [job.join() for job in jobs]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(used.ru_utime + used.ru_stime)
"""
    assert float(limited(federation, busy, CLIENTAPP_CPUS="0.25").stdout) < 2.0  # of 1 s


# ---- bad replies ------------------------------------------------------------------------------


def test_bad_replies_are_refused_and_a_restarted_site_keeps_its_state(federation):
    """The drill has the assertions: bad replies, forged metrics, an empty card."""
    seen = replies(Scene(federation))
    assert seen[-1].startswith("site 2 restarted: all rounds have the bits of one machine")

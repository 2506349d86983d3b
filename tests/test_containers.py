"""The image and docker/'s compose files in a real Docker Engine.

The commands are those of docker/README.md, word for word but for names and addresses. Skipped where
no engine answers. tests/container_faults.py has the drills.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread

import pytest

from tests.compose import DOCKER
from tests.containers import (
    IMAGE,
    Containers,
    build,
    build_changed,
    docker,
    free_port,
    inspect,
    own,
    why_no_engine,
)
from tests.deployed import ROOT, SITES
from tests.faults import replies
from tests.processes import SECONDS, finish, start, summary_of
from tests.scene import Scene

PROBLEM = why_no_engine()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(SECONDS + 600),
    pytest.mark.skipif(PROBLEM is not None, reason=f"no Docker Engine: {PROBLEM}"),
]
PROGRAMS = (
    "superlink",
    "serverapp",
    *(f"{one}-{n}" for n in SITES for one in ("supernode", "clientapp")),
)
EVERY = ("network", *PROGRAMS)
SAME = ("parameters_sha256", "accuracy", "bytes_up", "bytes_down", "failures")


@pytest.fixture(scope="module")
def image() -> str:
    if not os.environ.get("FEDHET_IMAGE"):
        build()
    return IMAGE


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
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    assert {name: pinned.get(name, listed[name]) for name in listed} == listed
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


# ---- runs ----------------------------------------------------------------------------------------


def blocks(heading: str) -> list[str]:
    """Return the blocks of commands below a heading of docker/README.md."""
    text = (
        (DOCKER / "README.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    )
    return [
        one.replace("\\\n", " ") for one in re.findall(r"^ *```\n(.*?)^ *```$", text, re.M | re.S)
    ]


class Machine:
    """A clone with its own docker/.env, in which an operator types commands."""

    def __init__(self, folder: Path, project: str, **settings: str) -> None:
        self.folder = folder
        shutil.copytree(
            DOCKER,
            folder / "docker",
            ignore=lambda top, names: {
                name
                for name in names
                if (top == str(DOCKER) and (Path(top) / name).is_dir()) or name == ".env"
            },
        )
        settings = {"FEDHET_USER": own(folder / "docker"), "FEDHET_IMAGE": IMAGE, **settings}
        self.configure(**settings)
        self.environment = {**os.environ, "COMPOSE_PROJECT_NAME": project}
        self.project = project

    def configure(self, **settings: str) -> None:
        with (self.folder / "docker" / ".env").open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in settings.items())

    def types(self, command: str) -> str:
        words = shlex.split(command)
        if "exec" in words:
            words.insert(words.index("exec") + 1, "-T")
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    def wait_until_healthy(self, command: str) -> None:
        end = time.monotonic() + SECONDS
        while "(healthy)" not in (said := self.types(command)):
            assert time.monotonic() < end, said
            time.sleep(1.0)

    def down(self, *files: str) -> list[str]:
        """Take everything down; return what is left."""
        for file in files:
            self.types(f"docker compose -f {file} down")
        label = f"label=com.docker.compose.project={self.project}"
        kinds = (["ps", "-a"], ["network", "ls"], ["volume", "ls"])
        return [one for kind in kinds for one in docker(*kind, "-q", "-f", label).split()]


def same_as_one_machine(found: Path, folder: Path, *words: str) -> None:
    """Compare a run with that of `fedhet runtime=local`."""
    code, said = finish(start(folder, *words, "runtime=local", f"results_dir={folder / 'alone'}"))
    assert code == 0, said
    here, alone = summary_of(found), summary_of(folder / "alone")
    assert here["status"] == "completed"
    assert {key: here[key] for key in SAME} == {key: alone[key] for key in SAME}


def test_the_readmes_commands_on_one_machine(image, tmp_path):
    """Three sites: FedPVR with its control variates, and MA-Echo with its projections."""
    machine = Machine(
        tmp_path / "clone", "fedhet-readme", FLEET_ADDRESS="127.0.0.1", FLEET_PORT=str(free_port())
    )
    keys, up = blocks("Four commands")[-1].splitlines()
    (run,) = (one for one in blocks("A run") if "fedhet runtime" in one)
    run = run.replace("docker/server.yaml", "docker/federation.yaml").replace(
        "rounds=20", "rounds=2"
    )
    try:
        machine.types(keys)
        machine.types(up)
        for strategy in ("fedpvr", "maecho"):
            said = machine.types(
                run.replace("strategy=fedpvr", f"strategy={strategy}").replace(
                    "/first", f"/{strategy}"
                )
            )
            assert "round " in said
            results = machine.folder / "docker" / "server" / "results" / strategy
            words = [
                word
                for word in shlex.split(run.partition("fedhet runtime")[2])[1:]
                if "results" not in word
            ]
            words = [word.replace("fedpvr", strategy) for word in words]
            (tmp_path / strategy).mkdir()
            same_as_one_machine(results, tmp_path / strategy, *words)
    finally:
        left = machine.down("docker/federation.yaml")
    assert left == []
    assert (machine.folder / "docker/server/results/fedpvr/model.safetensors").exists()


def test_the_readmes_four_commands_on_a_server_and_two_sites(image, tmp_path):
    """Machines that share nothing but the one published port: Compose projects of their own."""
    address = docker(
        "network", "inspect", "bridge", "-f", "{{(index .IPAM.Config 0).Gateway}}"
    ).strip()
    port = str(free_port())
    server = Machine(
        tmp_path / "server", "fedhet-machine-0", FLEET_ADDRESS=address, FLEET_PORT=port
    )
    sites = [Machine(tmp_path / f"site-{n}", f"fedhet-machine-{n + 1}") for n in range(2)]
    (listed, setting, *_) = blocks("Four commands")
    commands = [
        line.split("$", 1)[1].strip().replace("fl.example.org", address)
        for line in listed.splitlines()
    ]
    assert [line.split("$")[0] for line in listed.splitlines()] == [
        "server",
        "site",
        "server",
        "site",
    ]
    (run,) = (one for one in blocks("A run") if "fedhet runtime" in one)
    run = run.replace("rounds=20", "rounds=2").replace("clients=3", "clients=2")
    try:
        server.types(commands[0])
        for number, site in enumerate(sites):
            site.types(commands[1].replace("hospital-a", f"hospital-{number}"))
            keys = site.folder / "docker/site/keys"
            shutil.copy(server.folder / "docker/server/keys/ca.crt", keys)
            shutil.copy(keys / f"hospital-{number}.pub", server.folder / "docker/server/nodes")
        server.types(commands[2])
        for number, site in enumerate(sites):
            lines = [line.strip() for line in setting.splitlines()]
            settings = dict(line.split("=", 1) for line in lines)
            settings |= {"SUPERLINK": f"{address}:{port}", "PARTITION_ID": str(number)}
            settings |= {"NUM_PARTITIONS": "2", "SITE_DATA": str(tmp_path)}
            site.configure(**settings)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda site: site.types(commands[3]), sites))
        for site in sites:
            site.wait_until_healthy("docker compose -f docker/site.yaml ps supernode")
        server.types(run)
        words = [
            word
            for word in shlex.split(run.partition("fedhet runtime")[2])[1:]
            if "results" not in word
        ]
        same_as_one_machine(server.folder / "docker/server/results/first", tmp_path, *words)
    finally:
        left = [one for site in sites for one in site.down("docker/site.yaml")]
        left += server.down("docker/server.yaml")
    assert left == []


def test_bad_replies_are_refused_and_a_restarted_site_keeps_its_state(federation):
    """The drill has the assertions: thirteen bad replies, an empty card, forged metrics."""
    seen = replies(Scene(federation))
    assert seen[-1].startswith("site 2 restarted: all rounds have the bits of one machine")

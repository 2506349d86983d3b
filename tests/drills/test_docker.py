"""The files of docker/: what they promise, start.py and keys.py."""

import importlib.util
import re
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import grpc
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node

from fedhet.common.flower import database_locks, node_identity, programs
from fedhet.common.flower.line import installed_line, line_of
from fedhet.conf import PACKAGES
from tests.compose import COMPOSE, DOCKER, names_seen_by, services

FILES = ["server.yaml", "site.yaml", "federation.yaml"]
SITE = {"SUPERLINK": "fl.example.org:9092", "PARTITION_ID": "1", "NUM_PARTITIONS": "2"}


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docker_{name}", DOCKER / f"{name}.py")
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


start, keys, health = module("start"), module("keys"), module("health")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["site", "federation"])
def test_compose_accepts_the_files_for_gpus(name):
    words = ["-f", f"{name}.yaml", "-f", f"{name}.gpu.yaml", "config", "--quiet"]
    done = subprocess.run([COMPOSE, *words], cwd=DOCKER, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


# ---- what the files promise ----------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_every_container_is_confined_and_restarts(file):
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


@pytest.mark.slow
def test_one_port_is_published_and_control_is_on_loopback():
    federation = services(DOCKER / "federation.yaml", {})
    ports = {name: service.settings.get("ports") for name, service in federation.items()}
    published = {name: one for name, one in ports.items() if one}
    assert list(published) == ["network"]
    [port] = published["network"]
    assert (port["host_ip"], port["published"], port["target"]) == ("0.0.0.0", "9092", 9092)
    assert "--host=127.0.0.1" in federation["superlink"].words
    inside = {name for name, one in federation.items() if one.shares_network_of == "network"}
    assert inside == {"superlink", "gate", "serverapp", "register"}


@pytest.mark.parametrize(
    ("file", "number", "inside"),
    [("site.yaml", "", "inside"), *(("federation.yaml", f"-{n}", f"site-{n}") for n in range(3))],
)
def test_a_sites_code_has_its_data_but_no_key_and_no_way_out(file, number, inside):
    found = services(DOCKER / file, SITE)
    supernode, clientapp = found[f"supernode{number}"], found[f"clientapp{number}"]
    assert list(clientapp.networks) == [inside]
    assert yaml.safe_load((DOCKER / file).read_text())["networks"][inside] == {
        "internal": True,
        "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"},
    }
    assert set(names_seen_by(clientapp, found)) == {"runtime", clientapp.name, supernode.name}
    assert supernode.networks == {"default": (), inside: ("runtime",)}
    assert "--host=runtime" in supernode.words
    assert set(clientapp.mounts) == {"/tmp", "/data", "/state", "/run/secrets/executor.secret"}
    data = {volume["target"]: volume for volume in clientapp.settings["volumes"]}["/data"]
    assert data["read_only"] is True
    assert not {"/data", "/state"} & set(supernode.mounts)
    assert supernode.mounts["/run/secrets/node.key"] == DOCKER / f"site{number}" / "keys/node.key"


def test_the_image_has_all_packages_of_the_project():
    text = (DOCKER / "Dockerfile").read_text()
    ignored = (DOCKER.parent / ".dockerignore").read_text().splitlines()
    for package in (*PACKAGES, "reproductions", "fedhet"):
        assert f"COPY {package} {package}\n" in text
        assert f"!{package}/" in ignored
    for source in re.findall(r"^COPY ((?:[\w./]+ )+)", text, re.MULTILINE):
        for name in source.split():
            assert (DOCKER.parent / name).exists(), name


# ---- start.py ------------------------------------------------------------------------------------

SUPERLINK = services(DOCKER / "server.yaml", {})["superlink"].words[2:]
OPEN = "Control would listen on"
GRPC = {"FLWR_INTERNAL_GRPC_CONTROL_API": "1"}  # a second Control


def changed(old: str, *new: str) -> list[str]:
    assert old in SUPERLINK
    return [word for one in SUPERLINK for word in (new if one == old else (one,))]


def on(host: str) -> list[str]:
    return changed("--host=127.0.0.1", f"--host={host}")


def test_a_superlink_waits_a_minute_for_its_database(monkeypatch):
    from flwr.supercore import sql_mixin

    def seconds() -> float:
        connection = sqlite3.connect(":memory:")
        sql_mixin._set_sqlite_pragmas(connection, None)
        return connection.execute("PRAGMA busy_timeout").fetchone()[0] / 1000

    before = sql_mixin.SQLITE_PRAGMAS
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", before)
    assert seconds() == 5.0
    database_locks.install()
    assert seconds() == 60.0
    assert [name for name, _ in sql_mixin.SQLITE_PRAGMAS] == [name for name, _ in before]


@pytest.mark.slow
@pytest.mark.skipif(installed_line().has_gate, reason="tests/test_gate.py has the HTTP line's")
def test_no_node_can_speak_for_another():
    """Flower's interceptor alone serves what is refused here: its gaps are still there."""
    from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
        NodeAuthServerInterceptor,
    )

    class Interceptor(NodeAuthServerInterceptor):
        pass

    nodes = SimpleNamespace(get_node_id_by_public_key={b"mine": 7, b"theirs": 8}.get)

    def answer(request: object) -> str:
        context = Mock()
        context.abort.side_effect = PermissionError
        handler = grpc.unary_unary_rpc_method_handler(lambda request, context: "served")
        serve = Interceptor(SimpleNamespace(state=lambda: nodes))._wrap_method_handler
        try:
            return serve(handler, b"mine").unary_unary(request, context)
        except PermissionError:
            return context.abort.call_args.args[1]

    def push(src: int, answers: str) -> PushMessagesRequest:
        own, other = (
            Message(metadata=Metadata(src_node_id=one, dst_node_id=1, reply_to_message_id=to))
            for one, to in ((7, "question"), (src, answers))
        )
        return PushMessagesRequest(node=Node(node_id=7), messages_list=[own, other])

    requests = {
        "a message of another node": push(8, "question"),
        "a message that is no reply": push(7, ""),
        "the key of another node": ActivateNodeRequest(public_key=b"theirs"),
    }
    assert [answer(request) for request in requests.values()] == ["served"] * 3
    node_identity.check_callers(Interceptor, grpc)
    assert [answer(request) for request in requests.values()] == list(requests)
    assert answer(push(1, "")) == "a message of another node"  # the SuperLink's
    assert answer(PushMessagesRequest(node=Node(node_id=8))) == "Invalid node ID"
    assert answer(push(7, "question")) == "served"
    assert answer(ActivateNodeRequest(public_key=b"mine")) == "served"


def test_a_closed_or_knowingly_opened_control_and_the_files_own_commands_are_accepted(monkeypatch):
    monkeypatch.setattr(start.shutil, "which", lambda name: name)  # the image has nginx
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        start.check(on(host), {})
    start.check(on("0.0.0.0"), {start.OPEN_CONTROL: "yes"})
    start.check([*SUPERLINK, "--control-api-address=127.0.0.1:9093"], GRPC)
    for file in FILES:
        for service in services(DOCKER / file, SITE).values():
            if service.words[:2] == ("python", "/app/start.py"):
                start.check(start.fill_in(service.words[2:], service.environment), {})


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        *((on(host), {}, OPEN) for host in ("0.0.0.0", "::", "10.77.0.1", "", "no-host.invalid")),
        (changed("--host=127.0.0.1", "--hos", "0.0.0.0"), {}, f"{OPEN} 0.0.0.0"),
        ([*SUPERLINK, "--host", "0.0.0.0"], {}, f"{OPEN} 0.0.0.0"),
        (SUPERLINK, GRPC, OPEN),
        (changed("--enable-supernode-auth"), {}, "add --enable-supernode-auth"),
        ([*SUPERLINK, "--insecure"], {}, "in the clear"),
        (
            changed("--superexec-auth-secret-file=/run/secrets/executor.secret"),
            {},
            "add --superexec-auth-secret-file",
        ),
        (["flower-supernode", "--host=0.0.0.0", "--isolation=process"], {}, "executor's secret"),
        (["sh", "-c", "true"], {}, "allowed: flower-superlink"),
        ([], {}, "allowed: flower-superlink"),
    ],
)
def test_a_command_that_opens_the_server_is_refused(words, environment, said):
    with pytest.raises(start.Refused, match=said):
        start.check(words, environment)


def test_flowers_superlink_accepts_an_open_control():
    assert programs.superlink_options(on("0.0.0.0")[1:]).host == "0.0.0.0"


def test_a_name_is_loopback_if_all_of_its_addresses_are(monkeypatch):
    assert not start.is_loopback("runtime")
    both = [(2, 1, 6, "", (address, 0)) for address in ("127.0.0.1", "10.77.0.1")]
    monkeypatch.setattr(start.socket, "getaddrinfo", lambda *_: both)
    assert not start.is_loopback("both.example.org")


def test_a_command_has_the_words_of_the_installed_line(monkeypatch):
    fleet = "--fleet-api-address=0.0.0.0:9092"
    for release, has_fleet in (("1.39.0", True), ("1.42.0", False), ("1.99.0", False)):
        monkeypatch.setattr(start, "installed_line", partial(line_of, release))
        words = start.for_this_line(["flower-superlink", "--port=8000", fleet])
        assert words == ["flower-superlink", "--port=8000", *([fleet] if has_fleet else [])]
        assert start.for_this_line(["flower-supernode", fleet]) == ["flower-supernode", fleet]


def test_the_gate_waits_where_the_sites_have_a_port_of_their_own(monkeypatch, capsys):
    monkeypatch.setattr(start, "installed_line", partial(line_of, "1.39.0"))
    monkeypatch.setattr(start.signal, "sigwait", lambda signals: signals)
    start.check(["gate"], {})
    with pytest.raises(SystemExit) as end:
        start.become_gate([])
    assert end.value.code == 0
    assert "no gate is needed" in capsys.readouterr().out


def test_a_gate_without_nginx_is_refused(monkeypatch):
    monkeypatch.setattr(start, "installed_line", partial(line_of, "1.42.0"))
    monkeypatch.setattr(start.shutil, "which", lambda name: None)
    with pytest.raises(start.Refused, match="nginx"):
        start.check(["gate"], {})


@pytest.mark.slow
def test_a_missing_variable_is_named_and_a_refusal_is_printed_and_ends_the_container():
    for environment in ({}, {"PARTITION_ID": ""}):
        with pytest.raises(start.Refused, match="PARTITION_ID is not set"):
            start.fill_in(["--node-config=partition-id=${PARTITION_ID}"], environment)
    with pytest.raises(
        start.Refused, match="'cost=5\\$' has a \\$ that starts no name: write \\$\\$"
    ):
        start.fill_in(["cost=5$"], {})
    assert start.fill_in(["cost=5$$"], {}) == ["cost=5$"]
    command = [sys.executable, str(DOCKER / "start.py"), *on("::")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("refused to start: Control would listen on ::")


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["thread", "main"])
def test_a_supernode_ends_when_one_of_its_threads_dies(dies):
    words = f"""
import sys, threading, time, types
def supernode():
    print(sys.argv, flush=True)
    threading.Thread(target=lambda: {"1 / 0" if dies == "thread" else "time.sleep(60)"}).start()
    {"time.sleep(60)" if dies == "thread" else "1 / 0"}
sys.path.insert(0, sys.argv[1])
import start
start.mend("flower-supernode")
start.supernode_threads._SECONDS = 1.0
sys.argv = ["flower-supernode", "--insecure"]
supernode()
"""
    command = [sys.executable, "-c", words, str(DOCKER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert done.stdout == "['flower-supernode', '--insecure']\n"
    assert "ZeroDivisionError" in done.stderr
    assert ("a thread of the SuperNode died" in done.stderr) == (dies == "thread")


# ---- health.py -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_program_is_healthy_while_it_is_connected(family):
    """Also over a socket of IPv6 to an address of IPv4, as gRPC's is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConnectionError):
            health.require_connection(f"localhost:{port}")
        with socket.socket(family) as program:
            program.connect(("127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1", port))
            health.require_connection(f"localhost:{port}")
    with pytest.raises(ConnectionRefusedError):
        health.require_connection(f"localhost:{port}")


@pytest.mark.slow
def test_a_supernode_is_healthy_once_the_superlink_has_let_it_in(tmp_path):
    """Flower's own page and a connection say nothing of that: here nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as superlink, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address, port = f"127.0.0.1:{superlink.getsockname()[1]}", free.getsockname()[1]
        free.close()
        words = [f"--superlink={address}", "--insecure", "--isolation=process", f"--port={port}"]
        command = [sys.executable, str(DOCKER / "start.py"), "flower-supernode", *words]
        check = [sys.executable, str(DOCKER / "health.py"), f"http://127.0.0.1:{port}/health"]
        check += ["--connected-to", address]
        with subprocess.Popen(command, cwd=tmp_path) as supernode:
            try:
                while subprocess.run(check, stderr=subprocess.DEVNULL).returncode != 0:
                    assert supernode.poll() is None
                    time.sleep(0.5)
                checked = subprocess.run([*check, "--file", "activated"], cwd=tmp_path)
            finally:
                supernode.kill()
    assert checked.returncode == 1


# ---- keys.py -------------------------------------------------------------------------------------


def certificate(path: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(Path(path).read_bytes())


def test_the_servers_certificate_is_renewed_by_the_same_ca(tmp_path, monkeypatch):
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
    ca_key, ca = Path("ca/ca.key").read_bytes(), certificate("server/keys/ca.crt")
    Path("server/keys/ca.crt").unlink()  # with the server's disk; sites still have it
    keys.main(["server", "fl.example.org"])
    certificate("server/keys/server.crt").verify_directly_issued_by(ca)
    assert Path("ca/ca.key").read_bytes() == ca_key
    kept["ca.crt"] = Path("server/keys/ca.crt").read_bytes()
    Path("ca/ca.key").unlink()  # no second CA is made
    with pytest.raises(SystemExit, match=r"ca\.key is missing"):
        keys.main(["server", "fl.example.org"])
    assert kept == {name: Path("server/keys", name).read_bytes() for name in kept}


@pytest.mark.parametrize("host", ["fl.example.org:9092", "https://fl.example.org", "10.1.2.3:80"])
def test_a_certificate_is_for_a_name_or_an_address_alone(host, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        keys.main(["server", host])
    assert f"{host} must be" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


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


@pytest.mark.slow
def test_a_federation_has_everything_that_its_compose_file_mounts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys.main(["federation", "3"])
    mounted = services(DOCKER / "federation.yaml", {"FEDHET_DIR": str(tmp_path)}).values()
    wanted = {path for service in mounted for path in service.mounts.values() if path}
    assert len(wanted) > 15
    assert not [path for path in wanted if not path.exists()]
    secret = [path for path in tmp_path.rglob("*") if path.name.endswith((".key", ".secret"))]
    assert len(secret) == 9
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}
    assert len({path.read_bytes() for path in secret}) == 9

"""docker/README.md's commands in a Docker Engine, word for word but for names and addresses."""

import os
import re
import shlex
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.compose import DOCKER
from tests.drills.containers import IMAGE, MARKS, docker, free_port, image_of_this_clone, own
from tests.processes import SECONDS, finish, start, summary_of

pytestmark = MARKS
SAME = ("parameters_sha256", "accuracy", "bytes_up", "bytes_down", "failures")


@pytest.fixture(scope="module")
def image() -> str:
    return image_of_this_clone()


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

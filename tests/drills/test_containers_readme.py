"""docker/README.md's commands in a Docker Engine, word for word but for names and addresses."""

import os
import re
import shlex
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest

from tests.compose import DOCKER
from tests.drills.containers import IMAGE, MARKS, docker, free_port, image_of_this_clone, own
from tests.drills.test_hospitals import SITES, data_folder
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


def hospitals(home: Path, *folders: Path) -> Path:
    """Give each folder a hospital's own table; return the table of them all."""
    home.mkdir()
    table = pd.read_csv(data_folder(home) / "heart_disease" / "heart_disease.csv")
    names = SITES[: len(folders)]
    for name, folder in zip(names, folders, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        rows = table[table["hospital"] == name]
        rows.to_csv(folder / "heart_disease.csv", index=False)
    whole = home / "whole.csv"
    table[table["hospital"].isin(names)].to_csv(whole, index=False)
    return whole


def give_server(machine: Machine, whole: Path) -> None:
    folder = machine.folder / "docker" / "server" / "data" / "heart_disease"
    folder.mkdir()
    shutil.copy(whole, folder / "heart_disease.csv")


def same_as_one_machine(found: Path, folder: Path, *words: str) -> None:
    """Compare a run with that of `fedhet runtime=local`."""
    code, said = finish(start(folder, *words, "runtime=local", f"results_dir={folder / 'alone'}"))
    assert code == 0, said
    here, alone = summary_of(found), summary_of(folder / "alone")
    assert here["status"] == "completed"
    assert {key: here[key] for key in SAME} == {key: alone[key] for key in SAME}


def words_of(run: str, whole: Path) -> list[str]:
    """Return the words of a run's recipe for one machine that has all the tables."""
    words = shlex.split(run.partition("fedhet runtime")[2])[1:]
    alone = [word.replace("=site", "=natural") for word in words if "results" not in word]
    return [*alone, *([f"task.path={whole}"] if "task=heart_disease" in words else [])]


def test_the_readmes_commands_on_one_machine(image, tmp_path):
    """Three hospitals: FedPVR with its control variates; on digits MA-Echo with its projections."""
    machine = Machine(
        tmp_path / "clone", "fedhet-readme", FLEET_ADDRESS="127.0.0.1", FLEET_PORT=str(free_port())
    )
    keys, up = blocks("Four commands")[-1].splitlines()
    (run,) = (one for one in blocks("A run") if "fedhet runtime" in one)
    run = run.replace("docker/server.yaml", "docker/federation.yaml")
    run = run.replace("rounds=20", "rounds=2").replace("clients=4", "clients=3")
    other = run.replace("heart_disease partition=site", "digits").replace("/first", "/other")
    try:
        machine.types(keys)
        folders = [machine.folder / f"docker/site-{n}/data" for n in range(3)]
        whole = hospitals(tmp_path / "tables", *folders)
        give_server(machine, whole)
        machine.types(up)
        for one in (run, other.replace("strategy=fedpvr", "strategy=maecho")):
            assert "round " in machine.types(one)
            name = one.rpartition("/")[2].strip()
            results = machine.folder / "docker" / "server" / "results" / name
            (tmp_path / name).mkdir()
            same_as_one_machine(results, tmp_path / name, *words_of(one, whole))
    finally:
        left = machine.down("docker/federation.yaml")
    assert left == []
    assert (machine.folder / "docker/server/results/first/model.safetensors").exists()


def test_the_readmes_four_commands_on_a_server_and_four_sites(image, tmp_path):
    """Machines that share nothing but the one published port: Compose projects of their own."""
    address = docker(
        "network", "inspect", "bridge", "-f", "{{(index .IPAM.Config 0).Gateway}}"
    ).strip()
    port = str(free_port())
    server = Machine(
        tmp_path / "server", "fedhet-machine-0", FLEET_ADDRESS=address, FLEET_PORT=port
    )
    sites = [Machine(tmp_path / name, f"fedhet-machine-{n}") for n, name in enumerate(SITES, 1)]
    tables = [tmp_path / "mounted" / name for name in SITES]
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
    run = run.replace("rounds=20", "rounds=2")
    try:
        server.types(commands[0])
        whole = hospitals(tmp_path / "tables", *tables)
        give_server(server, whole)
        for name, site in zip(SITES, sites, strict=True):
            site.types(commands[1].replace("hospital-a", name))
            keys = site.folder / "docker/site/keys"
            shutil.copy(server.folder / "docker/server/keys/ca.crt", keys)
            shutil.copy(keys / f"{name}.pub", server.folder / "docker/server/nodes")
        server.types(commands[2])
        for number, site in enumerate(sites):
            lines = [line.strip() for line in setting.splitlines()]
            settings = dict(line.split("=", 1) for line in lines)
            settings |= {"SUPERLINK": f"{address}:{port}", "PARTITION_ID": str(number)}
            settings |= {"SITE_NAME": SITES[number], "SITE_DATA": str(tables[number])}
            site.configure(**settings)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda site: site.types(commands[3]), sites))
        for site in sites:
            site.wait_until_healthy("docker compose -f docker/site.yaml ps supernode")
        server.types(run)
        results = server.folder / "docker/server/results/first"
        same_as_one_machine(results, tmp_path, *words_of(run, whole))
    finally:
        left = [one for site in sites for one in site.down("docker/site.yaml")]
        left += server.down("docker/server.yaml")
    assert left == []

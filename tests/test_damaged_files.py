"""Damaged files: each is refused by name, or replaced by what is whole and said in the log.

Every kind of damage is done once to each form of file (checksummed tensors, lines, text, the cache,
a user's data), and a few to every other file of that form. No damage may give another result in
silence, and none may raise anything but an error of the user that names the file.
"""

import errno
import io
import logging
import multiprocessing
import pickle
import resource
import shutil
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.torch import load_file, save_file

from fedhet.client_app.state import FolderStateStore
from fedhet.common.checksums import CHECKPOINT, MODEL
from fedhet.common.errors import ConfigError, DamagedFileError
from fedhet.common.files import remove_unfinished
from fedhet.common.results import ResultsFollower, read_rows, read_summary
from fedhet.conf import compose, versions
from fedhet.load_run import model_of, recipe_of, task_of
from fedhet.report.run_data import read_run
from fedhet.server_app.checkpoint import checkpoints, last_whole_checkpoint
from fedhet.server_app.reused_training import check_reused_training
from fedhet.strategies.wire.tensor_files import load_tensors, save_tensors
from fedhet.sweep.resume import FolderTaken, Plan, plan_for
from fedhet.tools import evaluate, export
from fedhet.tools.by_site import evaluate_sites
from tests.recipes import TINY, newest_checkpoint, overrides, run_recipe
from tests.refused import refused
from tests.tasks.generated import make_task, write_hub_set, write_image_folder, write_texts

WORDS = [*TINY, "rounds=3", "strategy=scaffold", "local.epochs=1"]
pytestmark = pytest.mark.slow  # the runs that are damaged take some seconds

Damage = Callable[[bytes], bytes]


def flipped(place: float, bit: int = 0) -> Damage:
    """Flip a bit at a place in [0, 1) of the file."""

    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[int(place * len(content))] ^= 1 << bit
        return bytes(changed)

    return flip


def replaced(old: bytes, new: bytes) -> Damage:
    def change(content: bytes) -> bytes:
        assert old in content
        return content.replace(old, new, 1)

    return change


def archive(_: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("a", "b")
    return content.getvalue()


ANY_FILE: dict[str, Damage] = {
    "emptied": lambda content: b"",
    "one byte": lambda content: content[:1],
    "half": lambda content: content[: len(content) // 2],
    "without its last byte": lambda content: content[:-1],
    "zeros": lambda content: bytes(len(content)),
    "half zeros": lambda content: content[: len(content) // 2] + bytes(len(content) // 2),
    "text": lambda content: b"hello, this is no such file\n",
    "zip": archive,
    "pickle": lambda content: pickle.dumps({"a": 1}),
    "json": lambda content: b'{"a": 1}\n',
    "json list": lambda content: b"[1, 2]\n",
}
BINARY = {
    **ANY_FILE,
    "twice": lambda content: content + content,
    "with a byte more": lambda content: content + b"\0",
    "bit 0 of its first byte": flipped(0.0),
    "bit 7 of its first byte": flipped(0.0, 7),
    "bit at a tenth": flipped(0.1, 3),
    "bit in the middle": flipped(0.5, 6),
    "bit near the end": flipped(0.999, 2),
    "huge header": lambda content: (2**62).to_bytes(8, "little") + content[8:],
    "deep header": lambda content: (10**5).to_bytes(8, "little") + b"[" * 10**5,
}
TENSORS = {
    **BINARY,
    "other checksum": replaced(b'"sha256":"', b'"sha256":"0'),
    "no checksum": replaced(b'"sha256"', b'"sha257"'),
    "other format number": replaced(rb"\"format\": 3", rb"\"format\": 4"),
    "other kind": replaced(rb"\"kind\": \"", rb"\"kind\": \"x"),
    "other dtype": replaced(b'"F32"', b'"I32"'),
}
FEW = {
    name: TENSORS[name] for name in ("half", "bit in the middle", "other checksum", "other kind")
}
FLIPS = (0.02, 0.3, 0.6, 0.9)
LINES: dict[str, Damage] = {
    **{name: ANY_FILE[name] for name in ANY_FILE if name != "without its last byte"},
    "a digit": replaced(b'"loss": ', b'"loss": 1'),
    "without its first line": lambda content: content.split(b"\n", 1)[1],
    "without a line": lambda content: b"\n".join(np.delete(content.split(b"\n"), 1)),
    "lines in another order": lambda content: b"\n".join(content.split(b"\n")[:-1][::-1]) + b"\n",
    "a line twice": lambda content: content.split(b"\n")[0] + b"\n" + content,
    "a line of text": lambda content: b"oops\n" + content,
    "a row without its round": lambda content: b'{"loss": 1}\n' + content,
    "a round in words": lambda content: b'{"round": "one"}\n' + content,
    "bytes that are no text": lambda content: b"\xff\xfe" + content,
    "unbalanced": lambda content: b"[" * 10**5 + b"\n" + content,
}
TEXT: dict[str, Damage] = {
    **{name: ANY_FILE[name] for name in ANY_FILE if name != "without its last byte"},
    **{f"bit at {place}": flipped(place) for place in FLIPS},
    "bytes that are no text": lambda content: b"\xff\xfe" + content,
    "a digit": replaced(b": 0", b": 1"),
}


FEW_LINES = {name: LINES[name] for name in ("half", "a digit", "lines in another order")}


class Runs:
    """Finished runs, made once: of a recipe, as it was when it was killed, and of another seed."""

    def __init__(self, folder: Path) -> None:
        self.whole, self.cut, self.other = (folder / name for name in ("whole", "cut", "other"))
        words = [*WORDS, "checkpoint.client_models=true"]
        self.summary = run_recipe(self.whole, *words, tamper=self._watch)
        run_recipe(self.other, *words, "seed=1")

    def _watch(self, reply: Message) -> Message:
        newest = newest_checkpoint(self.whole)
        if newest and newest.stem == "round-000002" and not self.cut.exists():
            shutil.copytree(self.whole, self.cut)
        return reply


@pytest.fixture(autouse=True)
def warnings_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="flwr")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("damaged"))


@pytest.fixture
def whole(runs: Runs, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs.whole, tmp_path / "run"))


@pytest.fixture
def cut(runs: Runs, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs.cut, tmp_path / "cut"))


def damage(path: Path, change: Damage) -> None:
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before


def refuses(action: Callable[[], object], path: Path) -> str:
    """Return the error of an action, which has to be the user's and to name the file."""
    with refused(str(path)) as error:
        action()
    return str(error.value)


def table(damages: dict[str, Damage]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("change", damages.values(), ids=damages.keys())


def load_model(folder: Path) -> object:
    return model_of(folder, task_of(recipe_of(folder)))


def states_of(folder: Path) -> tuple[FolderStateStore, str, Path]:
    """Return the store of client 1, the run's name, and the file of its newest state."""
    run = read_summary(folder)["run"]
    newest = sorted((folder / "client_state" / run / "client-00001").glob("round-*"))[-1]
    return FolderStateStore(folder / "client_state", 1), run, newest


# ---- the envelope: tensors with a label and a checksum ------------------------------------------


@table(TENSORS)
def test_a_damaged_file_of_tensors_is_refused(change, tmp_path):
    path = tmp_path / "x.safetensors"
    numbers = torch.arange(300, dtype=torch.float32)
    save_tensors(path, {"a.weight": numbers, "b": numbers[:3]}, {"kind": MODEL, "round": 3})
    assert load_tensors(path, kind=MODEL, round=3)
    damage(path, change)
    refuses(lambda: load_tensors(path, kind=MODEL), path)


def test_every_byte_of_the_header_counts(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.ones(2)}, {"kind": MODEL})
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for place in range(header):
        path.write_bytes(flipped((place + 0.5) / len(content), place % 8)(content))
        refuses(lambda: load_tensors(path, kind=MODEL), path)


@pytest.mark.parametrize("other", [{"kind": CHECKPOINT}, {"round": 4}, {"run": "another"}])
def test_another_file_is_refused(other, tmp_path):
    path, label = tmp_path / "x.safetensors", {"kind": MODEL, "round": 3, "run": "a"}
    save_tensors(path, {"a": torch.ones(2)}, label)
    refuses(lambda: load_tensors(path, **label | other), path)


def save_too_much(path: Path) -> None:
    """Be killed in the middle of writing 4 MB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    save_tensors(path, {"w": torch.zeros(1 << 20)}, {"kind": MODEL})


def test_what_a_killed_writer_has_left_is_removed(tmp_path):
    path = tmp_path / "inner" / "model.safetensors"
    path.parent.mkdir()
    process = multiprocessing.get_context("fork").Process(target=save_too_much, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGXFSZ
    assert {one.name[0] for one in path.parent.iterdir()} == {"."}
    (path.parent / ".kept.txt").touch()
    remove_unfinished(tmp_path)
    assert [one.name for one in path.parent.iterdir()] == [".kept.txt"]


# ---- checkpoints ---------------------------------------------------------------------------------


@table(FEW)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(change, cut, caplog):
    first, last = checkpoints(cut / "checkpoints")
    damage(last, change)
    assert last_whole_checkpoint(cut) == first
    assert str(last) in caplog.text
    damage(first, change)
    message = refuses(lambda: last_whole_checkpoint(cut), last)
    assert str(first) in message


def test_from_the_one_before_the_run_ends_with_the_same_bits(runs, cut, caplog):
    damage(checkpoints(cut / "checkpoints")[-1], flipped(0.9))
    again = run_recipe(cut, *WORDS, "resume=true", "checkpoint.client_models=true")
    assert again["parameters_sha256"] == runs.summary["parameters_sha256"]
    assert "is used in its place" in caplog.text
    assert (again["rounds"], again["accuracy"]) == (3, runs.summary["accuracy"])
    assert len(checkpoints(cut / "checkpoints")) == 2  # the first is deleted


@pytest.mark.parametrize("swap", ["other run", "earlier round", "model", "client state"])
def test_a_swapped_checkpoint_gives_way_to_the_one_before(swap, runs, cut, caplog):
    first, last = checkpoints(cut / "checkpoints")
    source = {
        "other run": runs.other / "checkpoints" / last.name,
        "earlier round": first,
        "model": runs.whole / "model.safetensors",
        "client state": states_of(runs.whole)[2],
    }[swap]
    if swap == "other run":  # of the same round
        shutil.copy(checkpoints(runs.other / "checkpoints")[0], last)
    else:
        shutil.copy(source, last)
    assert last_whole_checkpoint(cut) == first
    assert "is used in its place" in caplog.text


def test_the_planner_of_a_sweep_reads_damaged_checkpoints_without_a_traceback(cut):
    recipe = compose(overrides(*WORDS, "checkpoint.client_models=true"))
    assert plan_for(cut, recipe) is Plan.CONTINUE
    first, last = checkpoints(cut / "checkpoints")
    damage(last, flipped(0.5))
    assert plan_for(cut, recipe) is Plan.CONTINUE
    damage(first, ANY_FILE["half"])
    with pytest.raises(FolderTaken):
        plan_for(cut, recipe)


# ---- client state, model, client models ----------------------------------------------------------


@table(FEW)
def test_a_damaged_client_state_is_said_once_and_lost(change, whole, caplog):
    store, run, path = states_of(whole)
    assert store.load(run, 3)
    damage(path, change)
    assert store.load(run, 3) == {} == store.load(run, 3)
    assert [str(path) in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("call", ["common.checksums.mmap", "client_app.state.os.stat"])
def test_a_client_state_that_cannot_be_read_now_stays(call, whole, monkeypatch):
    """As with too many open files, or a network folder that is away: the client fails a round."""
    store, run, path = states_of(whole)
    before = store.load(run, 3)

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output")

    with monkeypatch.context() as patch:
        patch.setattr(f"fedhet.{call}", fail)
        with refused("Input/output", kind=(OSError, ConfigError)):
            store.load(run, 3)
    assert path.exists()
    assert store.load(run, 3).keys() == before.keys()


@pytest.mark.parametrize("swap", ["other client", "other round", "other run", "checkpoint"])
def test_a_swapped_client_state_is_lost(swap, runs, whole, caplog):
    store, run, path = states_of(whole)
    source = {
        "other client": path.parent.with_name("client-00002") / path.name,
        "other round": path.with_name("round-000002.safetensors"),
        "other run": states_of(runs.other)[2],
        "checkpoint": checkpoints(whole / "checkpoints")[-1],
    }[swap]
    shutil.copy(source, path)
    assert store.load(run, 3) == {}
    assert str(path) in caplog.text


def test_a_run_that_goes_on_with_other_code_or_packages_says_so(cut, caplog, monkeypatch):
    monkeypatch.setattr("fedhet.server_app.run.versions", lambda: versions() | {"torch": "0.1"})
    run_recipe(cut, *WORDS, "resume=true", "checkpoint.client_models=true")
    (said,) = [line for line in caplog.messages if "the rounds so far ran with" in line]
    assert f"torch {versions()['torch']}" in said


def test_a_lost_state_starts_again(cut, caplog):
    """The server hears of it, and every client starts the control variates again."""
    for path in (cut / "client_state").rglob("client-00001/round-*.safetensors"):
        damage(path, flipped(0.7))
    summary = run_recipe(cut, *WORDS, "resume=true", "checkpoint.client_models=true")
    assert (summary["status"], summary["failures"]) == ("completed", 0)
    assert read_rows(cut / "metrics.jsonl")[-1]["state_lost"] > 0
    assert sum("and the state is lost" in line for line in caplog.messages) == 1


@table(FEW)
def test_a_damaged_model_is_refused(change, whole):
    path = whole / "model.safetensors"
    damage(path, change)
    refuses(lambda: load_model(whole), path)


@pytest.mark.parametrize("swap", ["other run", "checkpoint", "rewritten", "rewritten by hand"])
def test_a_swapped_model_is_refused_by_every_tool(swap, runs, whole, tmp_path, capsys):
    path = whole / "model.safetensors"
    tensors = load_file(path)
    if swap == "other run":
        shutil.copy(runs.other / "model.safetensors", path)
    elif swap == "checkpoint":
        shutil.copy(checkpoints(whole / "checkpoints")[-1], path)
    else:  # as version 0.1 wrote it, without a checksum, but with another number
        next(iter(tensors.values())).view(-1)[0] += 1e-6 if swap == "rewritten" else 1.0
        save_file(tensors, path)
    for main, more in ((evaluate.main, []), (export.main, ["--out", str(tmp_path / "x.pt2")])):
        with pytest.raises(SystemExit):
            main([str(whole), *more])
        assert str(path) in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x.pt2").exists()


@table(FEW)
def test_damaged_client_models_are_refused(change, whole):
    path = whole / "client_models.safetensors"
    damage(path, change)
    recipe = compose(overrides(*WORDS, "rounds=1"))
    config = (whole / "config.yaml").read_text().replace("rounds: 3", "rounds: 1")
    (whole / "config.yaml").write_text(config)
    (whole / "summary.json").unlink()
    refuses(lambda: check_reused_training(recipe, whole, 1), path)


# ---- metrics.jsonl, summary.json, config.yaml ----------------------------------------------------


@table(FEW_LINES)
def test_damaged_metrics_are_refused(change, whole, cut, capsys):
    """A completed run is none any more; one that was killed is not resumed."""
    damage(whole / "metrics.jsonl", change)
    run = read_run(whole, "a", 0)
    assert run.status == "unfinished"
    assert "metrics.jsonl" in run.error
    with pytest.raises(SystemExit):
        evaluate.main([str(whole)])
    assert "metrics.jsonl" in capsys.readouterr().err


@table(LINES)
def test_a_run_with_damaged_metrics_is_not_resumed(change, cut):
    """Half of it leaves rows that no checkpoint of the two is of."""
    damage(cut / "metrics.jsonl", change)
    refuses(lambda: last_whole_checkpoint(cut), cut / "metrics.jsonl")


def test_metrics_of_another_run_are_refused(runs, whole, cut):
    shutil.copy(runs.other / "metrics.jsonl", whole)
    assert "of another run" in read_run(whole, "a", 0).error
    shutil.copy(runs.other / "metrics.jsonl", cut)
    message = refuses(lambda: last_whole_checkpoint(cut), cut / "metrics.jsonl")
    assert "delete metrics.jsonl to continue without its rows" in message


@pytest.mark.parametrize("line", [b'{"round": 4, "accu\n', b"\xff\xfe\n", b"[]\n", b"{}\n"])
def test_a_launcher_refuses_damaged_metrics(line, cut):
    path = cut / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + line)
    refuses(lambda: ResultsFollower(cut), path)


def test_without_metrics_a_run_goes_on_and_says_what_is_missing(runs, cut, caplog):
    (cut / "metrics.jsonl").unlink()
    summary = run_recipe(cut, *WORDS, "resume=true", "checkpoint.client_models=true")
    assert "metrics.jsonl is missing" in caplog.text
    assert (summary["rounds"], summary["rounds_without_rows"]) == (1, 2)
    assert summary["parameters_sha256"] == runs.summary["parameters_sha256"]


def test_a_completed_run_without_metrics_can_be_made_longer(whole):
    (whole / "metrics.jsonl").unlink()
    summary = run_recipe(whole, *WORDS, "rounds=4", "resume=true", "checkpoint.client_models=true")
    assert (summary["status"], summary["rounds_without_rows"]) == ("completed", 3)


def test_a_row_that_was_cut_short_is_measured_again(runs, cut, caplog):
    """Its checkpoint is of more rows than there are, so the one before counts."""
    path = cut / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    summary = run_recipe(cut, *WORDS, "resume=true", "checkpoint.client_models=true")
    assert [row["round"] for row in read_rows(path)] == [0, 1, 2, 3]
    assert summary["parameters_sha256"] == runs.summary["parameters_sha256"]


@table(TEXT)
def test_a_damaged_summary_is_refused(change, whole):
    path = whole / "summary.json"
    damage(path, change)
    refuses(lambda: read_summary(whole), path)
    refuses(lambda: load_model(whole), path)
    run = read_run(whole, "a", 0)
    assert (run.status, "summary.json" in run.error) == ("unfinished", True)


@table({name: TEXT[name] for name in ("emptied", "half", "a digit", "bytes that are no text")})
def test_a_damaged_config_is_refused(change, whole):
    path = whole / "config.yaml"
    damage(path, change)
    refuses(lambda: recipe_of(whole), path)
    run = read_run(whole, "a", 0)
    assert (run.status, "config.yaml" in run.error) == ("unfinished", True)


# ---- the cache -----------------------------------------------------------------------------------

ARRAYS = {
    **{name: BINARY[name] for name in BINARY if "header" not in name},
    "another array": lambda content: npy(np.zeros((3, 4))),
    "objects": lambda content: npy(np.array([{}], dtype=object)),
}


def npy(values: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, values, allow_pickle=True)
    return content.getvalue()


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of small data sets, with a cache of its own."""
    monkeypatch.delenv("FEDHET_DATA", raising=False)
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "cache"))
    write_hub_set(tmp_path / "data", "mnist", count=12)
    texts = ["good film good", "bad film bad"] * 3
    for split in ("train", "test"):
        write_texts(tmp_path / "data" / "imdb" / f"{split}.parquet", texts, [1, 0] * 3)
    return tmp_path / "data"


def examples(data: Path, name: str = "mnist") -> list[torch.Tensor]:
    """Return all that a client and the server read, from a new task."""
    task = make_task(name, path=str(data), **({"length": 6} if name == "imdb" else {}))
    parts = [task.client_data(client)[0] for client in range(3)] + [task.test_data()]
    return [
        tensor
        for part in parts
        for batch in part.batches(100, generator=None, train=False)
        for tensor in batch
    ]


CACHED = [
    ("mnist", "images/mnist-train-*/images.npy"),
    ("mnist", "images/mnist-test-*/labels.npy"),
    ("mnist", "images/mnist-train-*/checksums.json"),
    ("mnist", "partitions/iid-*/rows.npy"),
    ("mnist", "partitions/iid-*/borders.npy"),
    ("imdb", "tokens/imdb-vocabulary-*/vocabulary.txt"),
]


@pytest.mark.parametrize(
    ("task", "file", "change"),
    [
        pytest.param(*case, change, id=f"{case[1]} {name}")
        for case in CACHED
        for name, change in ARRAYS.items()
        if case is CACHED[0] or name in ("half", "bit in the middle")
    ],
)
def test_a_damaged_cache_is_made_again_and_said(task, file, change, data, caplog):
    before = examples(data, task)
    [path] = data.with_name("cache").glob(file)
    damage(path, change)
    again = examples(data, task)
    assert all(map(torch.equal, again, before))
    assert len(again) == len(before)
    assert f"{path.parent} " in caplog.text
    assert "made again" in caplog.text


@pytest.mark.parametrize("swap", ["file", "folder", "removed", "added", "no checksums", "a file"])
def test_a_swapped_cache_is_made_again_and_said(swap, data, caplog):
    before = examples(data)
    cache = data.with_name("cache") / "images"
    [train], [test] = cache.glob("mnist-train-*"), cache.glob("mnist-test-*")
    if swap == "file":
        shutil.copy(test / "labels.npy", train)
    elif swap == "folder":
        shutil.rmtree(train)
        shutil.copytree(test, train)
    elif swap == "removed":
        (train / "labels.npy").unlink()
    elif swap == "added":
        shutil.copy(train / "labels.npy", train / "groups.npy")
    elif swap == "no checksums":
        (train / "checksums.json").unlink()
    else:
        shutil.rmtree(train)
        train.write_text("oops")
    again = examples(data)
    assert all(map(torch.equal, again, before))
    assert f"{train} " in caplog.text


# ---- data folders --------------------------------------------------------------------------------

PARQUET = {
    **{name: BINARY[name] for name in BINARY if name not in ("bit at a tenth", "twice")},
    "a byte of an image": lambda content: content.replace(b"IDATx", b"IDATy", 1),
    "an image that is none": replaced(b"\x89PNG", b"\x88PNG"),
    "footer": flipped(0.99, 4),
}


def same_or_refused(read: Callable[[], list[torch.Tensor]], path: Path, change: Damage) -> None:
    """Some bytes of a user's file are never read, and its format may have no checksums."""
    before = read()
    damage(path, change)
    again: list[torch.Tensor] | str
    try:
        again = read()
    except DamagedFileError as error:
        again = str(error)
    if isinstance(again, str):
        assert str(path) in again
    else:
        assert all(map(torch.equal, again, before))


@table(PARQUET)
def test_a_damaged_parquet_file_is_refused_or_gives_the_same(change, data):
    same_or_refused(lambda: examples(data), data / "mnist" / "train.parquet", change)


IMAGE = {
    **{name: BINARY[name] for name in BINARY if name not in ("twice", "with a byte more")},
    "bit of its size": flipped(0.05),
}


@table(IMAGE)
def test_a_damaged_image_is_refused_or_gives_the_same(change, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "cache"))
    write_image_folder(tmp_path / "train", {"cat": 4, "dog": 4})

    def read() -> list[torch.Tensor]:
        task = make_task("image_folder", path=str(tmp_path), image_size=12)
        return [torch.from_numpy(np.array(task.train_split.read()))]

    same_or_refused(read, tmp_path / "train" / "dog" / "001.png", change)


@pytest.fixture
def mnist_run(data: Path, tmp_path: Path) -> list[str]:
    """Return the words of a run on the files, which is completed."""
    words = ["task=mnist", "task.model=mlp", f"task.path={data}", "clients=2", "partition=iid"]
    words += ["runtime.channels_last=false", "checkpoint.every=1"]
    run_recipe(tmp_path / "run", *words, "rounds=1")
    return words


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_run_is_not_resumed_on_other_examples(split, mnist_run, data, tmp_path):
    path = data / "mnist" / f"{split}.parquet"
    write_hub_set(tmp_path / "elsewhere", "mnist", count=12)  # the same bytes elsewhere
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    more = ["rounds=2", "resume=true", f"task.path={tmp_path / 'elsewhere'}"]
    assert run_recipe(tmp_path / "again", *mnist_run, *more)["rounds"] == 2
    write_hub_set(tmp_path / "new", "mnist", count=14)
    shutil.copy(tmp_path / "new" / "mnist" / "train.parquet", path)
    message = f"the {split} examples"
    with refused(*message.split()) as error:
        run_recipe(tmp_path / "run", *mnist_run, "rounds=2", "resume=true")
    assert str(path) in str(error.value)


def test_a_model_is_not_evaluated_on_a_test_set_that_has_changed(mnist_run, data, tmp_path, capsys):
    assert evaluate.evaluate(tmp_path / "run").examples == 8
    path = data / "mnist" / "test.parquet"
    shutil.copy(data / "mnist" / "train.parquet", path)
    with pytest.raises(SystemExit):
        evaluate.main([str(tmp_path / "run")])
    said = " ".join(capsys.readouterr().err.split())
    assert "the test set has changed since the run" in said
    assert str(path) in said
    assert evaluate.evaluate(tmp_path / "run", [f"path={data}"]).examples == 12  # as asked for


def test_a_table_that_has_changed_is_noticed(tmp_path, capsys):
    rows = [f"{number},{number % 7},{'low' if number % 3 else 'high'}" for number in range(40)]
    table, words = tmp_path / "rows.csv", ["task=tabular", "task.classes=[low,high]", "clients=2"]
    words += [f"task.path={table}", "task.target=c", "partition=iid"]
    for lines in (rows, [row.replace("low", "high") if row[0] == "1" else row for row in rows]):
        table.write_text("\n".join(["a,b,c", *lines]) + "\n")
        if lines is rows:
            used = run_recipe(tmp_path / "run", *words, "rounds=1", clients=2)["data"]
            assert {split: about["function"] for split, about in used.items()} == dict.fromkeys(
                ("train", "test"), "fedhet.tasks.tabular:load"
            )
            assert evaluate.evaluate(tmp_path / "run").examples == 8
    with refused():
        run_recipe(tmp_path / "run", *words, "rounds=2", "resume=true", clients=2)
    with pytest.raises(SystemExit):
        evaluate.main([str(tmp_path / "run")])
    assert "the test set has changed since the run" in " ".join(capsys.readouterr().err.split())
    with refused("training"):
        evaluate_sites(tmp_path / "run")


def test_a_table_in_other_units_is_refused_or_scaled_as_the_models_was(tmp_path):
    def write(path: Path, unit: int) -> Path:
        rows = [f"{unit * n},{n % 7},{'low' if n % 3 else 'high'}" for n in range(40)]
        path.write_text("\n".join(["a,b,c", *rows]) + "\n")
        return path

    run, table = tmp_path / "run", write(tmp_path / "rows.csv", 1)
    words = ["task=tabular", f"task.path={table}", "task.target=c", "partition=iid", "clients=2"]
    run_recipe(run, *words, "rounds=1", clients=2)
    once = evaluate.evaluate(run)
    assert evaluate.evaluate(run, [f"path={table}"]).loss == pytest.approx(once.loss)
    write(table, 100)
    for evaluated in (evaluate.evaluate, evaluate_sites):
        with refused(str(table), "--task path"):
            evaluated(run)
    other = evaluate.evaluate(run, [f"path={write(tmp_path / 'other.csv', 100)}"])
    assert evaluate.evaluate(run, [f"path={table}"]) == other
    assert abs(other.loss - once.loss) > 0.1
    table.unlink()
    assert export.export(run, tmp_path / "model.pt2")["input"]["shape"] == ["batch", 2]

"""Finished runs that the tests of several tools read."""

import numpy as np
import pytest
from PIL import Image

from tests.recipes import TINY, run_recipe
from tests.tasks.generated import write_texts

COLOURS = {"blue": (40, 40, 200), "green": (40, 200, 40), "red": (200, 40, 40)}


@pytest.fixture
def refused(capsys):
    """Return a function that runs a command and returns why it failed, in one line."""

    def reason(main, *words):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        assert ended.value.code == 1
        return " ".join(capsys.readouterr().err.split())

    return reason


@pytest.fixture(scope="session")
def fedavg_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fedavg")
    run_recipe(folder, *TINY, "rounds=1")
    return folder


@pytest.fixture(scope="session")
def fedper_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fedper")
    run_recipe(folder, *TINY, "rounds=1", "strategy=fedper", "evaluation.model=both")
    return folder


@pytest.fixture(scope="session")
def ditto_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ditto")
    run_recipe(folder, *TINY, "rounds=1", "strategy=ditto", "partition.alpha=0.1")
    return folder


def write_images(folder, count, colours, seed=0):
    """Write train/ and test/ with images of nearly one colour per class."""
    random = np.random.default_rng(seed)
    for split in ("train", "test"):
        for name, colour in colours.items():
            place = folder / split / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = colour + random.integers(-25, 26, (8, 8, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    return folder


@pytest.fixture(scope="session")
def image_run(tmp_path_factory):
    """Return a run on an image folder, and where the folder has been moved since."""
    folder = tmp_path_factory.mktemp("images")
    data = write_images(folder / "data", 12, COLOURS)
    run_recipe(
        folder / "run",
        *("task=image_folder", f"task.path={data}", "task.model=mlp", "task.image_size=8"),
        *("clients=2", "rounds=1", "partition=iid", "local=adam", "local.epochs=20"),
    )
    return folder / "run", data.rename(folder / "elsewhere")


@pytest.fixture(scope="session")
def table_run(tmp_path_factory):
    """Return a run on a table with a missing number and a missing category, and its table."""
    folder = tmp_path_factory.mktemp("table")
    rows = [f"{20 + n},7,{'ABC'[n % 3]},{'yes' if n % 2 else 'no'}" for n in range(60)]
    rows[4], rows[5] = ",7,A,no", "25,7,,yes"
    (folder / "rows.csv").write_text("\n".join(["age,constant,town,y", *rows]) + "\n")
    run_recipe(
        folder / "run",
        *("task=tabular", f"task.path={folder / 'rows.csv'}", "clients=2", "rounds=1"),
        *("task.target=y", "task.classes=[no,yes]", "partition=iid"),
        "task.data_options.public=100",
        clients=2,
    )
    return folder / "run", folder / "rows.csv"


@pytest.fixture(scope="session")
def regression_run(tmp_path_factory):
    """Return a run on y = 2 x + 300 that measures two metrics, and its table."""
    folder = tmp_path_factory.mktemp("regression")
    rows = "".join(f"{n},{2 * n + 300}\n" for n in range(60))
    (folder / "rows.csv").write_text(f"x,y\n{rows}")
    run_recipe(
        folder / "run",
        *("task=tabular", f"task.path={folder / 'rows.csv'}", "task.kind=regression"),
        *("task.target=y", "task.model_options={mean:360,std:35}", "partition=iid"),
        "task.data_options.public=100",
        *("clients=2", "rounds=1", "local.optimizer=adam", "evaluation.metrics=[mae,r2]"),
        clients=2,
    )
    return folder / "run", folder / "rows.csv"


@pytest.fixture(scope="session")
def masks_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    shapes = "task.data_options={examples:20,test_examples:6,size:16}"
    small = ["task.model_options={width:2,depth:1}", "clients=2", "rounds=1", "partition=iid"]
    run_recipe(folder / "run", "task=shapes", shapes, *small, clients=2)
    return folder / "run"


@pytest.fixture(scope="session")
def text_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    texts = ["good film good", "bad film bad", "good good", "bad bad"] * 5
    for split in ("train", "test"):
        write_texts(folder / "data" / "imdb" / f"{split}.parquet", texts, [1, 0] * 10)
        new = [f"new {text}" for text in texts]
        write_texts(folder / "new" / "imdb" / f"{split}.parquet", new, [1, 0] * 10)
    run_recipe(
        folder / "run",
        *("task=imdb", f"task.path={folder / 'data'}", "clients=2", "rounds=1"),
        *("task.length=6", "task.vocabulary_size=6", "partition=iid", "local.batch_size=4"),
    )
    return folder / "run", folder / "new"

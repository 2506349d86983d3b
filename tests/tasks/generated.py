"""Small generated data in the hub's schemas and in image folders, and the recipes' task values."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import yaml
from PIL import Image
from pyarrow import parquet

from fedhet.tasks import build_task

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted((CONF / "task").glob("*.yaml"))
TASKS = [path.stem for path in FILES if "inputs: own" not in path.read_text()]


def values(group, name, **changes):
    """Return conf/<group>/<name>.yaml as plain values."""
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text()) | changes


def make_task(name, partition="iid", *, seed=0, clients=3, options=None, **changes):
    """Return a task as the recipe has it, with changes to its keys and to the partition's."""
    return build_task(
        values("task", name, **changes),
        values("partition", partition, **(options or {})),
        seed=seed,
        num_clients=clients,
    )


def random_images(count, size, channels, seed=0):
    """Return random pixels (n, H, W) or (n, H, W, 3)."""
    shape = (count, size, size) if channels == 1 else (count, size, size, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_parquet(path, images, columns, image_column="image"):
    """Write a split in the hub's schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    structs = []
    for pixels in images:
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, format="PNG")
        structs.append({"bytes": buffer.getvalue(), "path": None})
    parquet.write_table(pa.table({image_column: structs, **columns}), path, row_group_size=16)


def write_hub_set(root, name, count=40):
    """Write train and test splits as the hub has them for the task; returns the training images."""
    task = values("task", name)
    images = random_images(count, task["image_size"], task["channels"])
    labels = np.arange(count) % task["num_classes"]
    columns = {task["label_column"]: labels, "another": labels}
    if "client_column" in task:
        columns[task["client_column"]] = [f"f{row % 4:04d}_00" for row in range(count)]
    for split, rows in (("train", count), (task.get("test_split", "test"), 8)):
        if split is not None:
            shown = {key: column[:rows] for key, column in columns.items()}
            path = root / name / f"{split}.parquet"
            write_parquet(path, images[:rows], shown, task["image_column"])
    return images


def write_texts(path, texts, labels, **columns):
    """Write a split of texts in the hub's schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table({"text": texts, "label": labels, **columns}), path)


def write_image_folder(folder, counts, size=12, seed=0):
    """Write counts[name] PNGs for each class."""
    for label, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for row, pixels in enumerate(random_images(count, size, 3, seed=100 * seed + label)):
            Image.fromarray(pixels).save(folder / name / f"{row:03d}.png")

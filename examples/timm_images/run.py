"""Trains a ViT of timm's on a folder of images that it draws: python run.py"""

import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ["checked", "horizontal", "vertical"]
WORDS = [
    "task=image_folder",
    "task.path=data/stripes",
    "task.model=network:vit",
    "task.image_size=32",
    "task.crop_padding=4",
    "task.mean=[0.5,0.5,0.5]",
    "task.std=[0.25,0.25,0.25]",
    "partition=dirichlet",
    "partition.alpha=1.0",
    "clients=4",
    "rounds=10",
    "local=adam",
    "local.lr=0.001",
    "local.epochs=2",
    "local.batch_size=32",
    "runtime=local",
]


def draw_images(folder, train=200, test=50):
    """Draw so many images of every class: its stripes in some colour, with noise."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = np.clip(_draw(name, rng), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number:03}.png")


def _draw(name, rng):
    width, shift = rng.integers(2, 5), rng.integers(0, 8, 2)
    down, across = np.mgrid[:32, :32] + shift[:, None, None]
    rows, columns = down // width % 2, across // width % 2
    stripes = {"horizontal": rows, "vertical": columns, "checked": rows ^ columns}[name]
    contrast = rng.integers(0, 128, 3)
    return 128 + (stripes[..., None] - 0.5) * contrast + rng.normal(0, 25, (32, 32, 3))


if __name__ == "__main__":
    draw_images(Path("data/stripes"))
    command = [sys.executable, "-m", "fedhet", *WORDS, *sys.argv[1:]]
    sys.exit(subprocess.run(command, check=False).returncode)

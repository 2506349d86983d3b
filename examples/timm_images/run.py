"""Trains timm's MobileNetV3 on a folder of images that it draws: python run.py"""

import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ["disc", "square", "triangle"]
WORDS = [
    "task=image_folder",
    "task.path=data/shapes",
    "task.model=network:mobilenet",
    "task.image_size=32",
    "task.crop_padding=4",
    "task.mean=[0.5,0.5,0.5]",
    "task.std=[0.25,0.25,0.25]",
    "partition=dirichlet",
    "partition.alpha=1.0",
    "clients=4",
    "rounds=10",
    "local=adam",
    "local.lr=0.003",
    "local.epochs=2",
    "local.batch_size=32",
    "runtime=local",
]


def draw_images(folder, train=200, test=50):
    """Draw so many images of every class: its shape somewhere on a noisy background."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                image = Image.fromarray(rng.integers(0, 128, (32, 32, 3), dtype=np.uint8))
                _draw(ImageDraw.Draw(image), name, rng)
                image.save(folder / split / name / f"{number:03}.png")


def _draw(canvas, name, rng):
    x, y, reach = rng.integers(9, 23), rng.integers(9, 23), rng.integers(5, 9)
    color = tuple(int(value) for value in rng.integers(128, 256, 3))
    box = [(int(x - reach), int(y - reach)), (int(x + reach), int(y + reach))]
    if name == "disc":
        canvas.ellipse(box, fill=color)
    elif name == "square":
        canvas.rectangle(box, fill=color)
    else:
        canvas.polygon([(box[0][0], box[1][1]), box[1], (int(x), box[0][1])], fill=color)


if __name__ == "__main__":
    draw_images(Path("data/shapes"))
    command = [sys.executable, "-m", "fedhet.launch", *WORDS, *sys.argv[1:]]
    sys.exit(subprocess.run(command, check=False).returncode)

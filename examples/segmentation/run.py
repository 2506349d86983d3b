"""Finds discs and squares in noise with a small U-Net at four clients: python run.py"""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from fedhet import load_weights
from fedhet.tasks.segmentation import UNet, shapes

WIDTH = 8
WORDS = [
    "task=shapes",  # or: task=segmentation task.path=YOURS task.num_classes=3
    f"task.model_options.width={WIDTH}",
    "partition=iid",
    "clients=4",
    "rounds=15",
    "local=adam",
    "local.lr=0.01",
    "local.epochs=2",
    "local.batch_size=8",
    "evaluation.metrics=[iou]",
    "runtime=local",
]


def score(folder, **options):
    """Return each class's intersection over union on the test images."""
    _, (images, masks) = shapes(0, **options)
    model = UNet(3, images.shape[1:], width=WIDTH)
    load_weights(model, folder)
    with torch.no_grad():
        found = model.eval()(torch.tensor(images)).argmax(1).numpy()
    pairs = [(found == label, masks == label) for label in range(3)]
    return [float((one & other).sum() / (one | other).sum()) for one, other in pairs]


if __name__ == "__main__":
    results = Path("results") / time.strftime("shapes_%Y-%m-%d_%H-%M-%S")
    command = [sys.executable, "-m", "fedhet", *WORDS, f"results_dir={results}"]
    subprocess.run([*command, *sys.argv[1:]], check=True)
    classes = score(results)
    print(f"IoU of background, disc, square: {np.round(classes, 3)}; mean {np.mean(classes):.3f}")

"""A network and each client's digits, as in any Flower app."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SETTINGS = {"rounds": 5, "local.epochs": 2}  # keys of fedhet's recipes


class Net(nn.Module):
    """A small convolutional network: images (B, 1, 8, 8) to logits (B, 10)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images):
        """Return the logits."""
        values = nn.functional.max_pool2d(torch.relu(self.conv(images)), 2)
        return self.fc2(torch.relu(self.fc1(values.flatten(1))))


def load_data(partition_id, num_partitions):
    """Return a client's training and test examples: it has a few of the ten digits."""
    digits = load_digits()
    shards = np.array_split(np.argsort(digits.target, kind="stable"), 3 * num_partitions)
    rows = np.concatenate(shards[partition_id::num_partitions])
    np.random.default_rng(partition_id).shuffle(rows)
    images = torch.tensor(digits.images[rows][:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target[rows])
    cut = int(0.8 * len(rows))
    train = TensorDataset(images[:cut], labels[:cut])
    test = TensorDataset(images[cut:], labels[cut:])
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=32)

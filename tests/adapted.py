"""A small network with LoRA's adapters, and the words of a recipe that trains it."""

from collections import OrderedDict

from torch import nn

LORA = [
    "task.model=tests.adapted:network",
    "task.lora={r:4,alpha:8,target_modules:[first,second]}",
]


def network(num_classes: int = 10, size: int = 64, width: int = 16) -> nn.Module:
    """Return three linear layers, of which the first two are to be adapted."""
    layers = OrderedDict[str, nn.Module](flat=nn.Flatten(), first=nn.Linear(size, width))
    layers |= {"bend": nn.ReLU(), "second": nn.Linear(width, width), "again": nn.ReLU()}
    layers["last"] = nn.Linear(width, num_classes)
    return nn.Sequential(layers)

"""A package of the project's own, by the name of one of fedhet's."""

from fedhet import FedPVR

METHOD = FedPVR(layers="last:1")
SETTINGS = {"rounds": 2, "local.epochs": 1, "local.lr": 0.1, "local.batch_size": 32}

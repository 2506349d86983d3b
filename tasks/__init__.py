"""Data sets, partitions, models and metrics."""

from common.errors import ConfigError
from tasks.device import keep_freed_memory, pick_device
from tasks.models import MODELS, Model, build_model
from tasks.task import Task, build_task
from tasks.tensor_data import TensorData
from tasks.transform import Transform

__all__ = [
    "MODELS",
    "ConfigError",
    "Model",
    "Task",
    "TensorData",
    "Transform",
    "build_model",
    "build_task",
    "keep_freed_memory",
    "pick_device",
]

"""Data sets, partitions, models and metrics."""

from fedhet.common.errors import ConfigError
from fedhet.tasks.device import keep_freed_memory, make_repeatable, pick_device
from fedhet.tasks.models import MODELS, Model, build_model
from fedhet.tasks.own_data import Functions
from fedhet.tasks.own_task import OwnTask
from fedhet.tasks.table_task import TableTask
from fedhet.tasks.task import AnyData, AnyTask, Task, build_task
from fedhet.tasks.tensor_data import TensorData
from fedhet.tasks.transform import Transform

__all__ = [
    "MODELS",
    "AnyData",
    "AnyTask",
    "ConfigError",
    "Functions",
    "Model",
    "OwnTask",
    "TableTask",
    "Task",
    "TensorData",
    "Transform",
    "build_model",
    "build_task",
    "keep_freed_memory",
    "make_repeatable",
    "pick_device",
]

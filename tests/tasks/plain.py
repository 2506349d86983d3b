"""Tasks of conf/task built from their files, without composing a recipe."""

from typing import Any

from omegaconf import OmegaConf

from fedhet.conf import FOLDER
from fedhet.tasks import OwnTask, build_task
from fedhet.tasks.config import NAMED

IID = {"name": "iid", "holdout": 0.0, "seed": None}
SITE = {"name": "site", "holdout": 0.25, "seed": None}


def task_of(
    name: str,
    options: dict[str, Any],
    partition: dict[str, Any] = IID,
    clients: int = 2,
    **keys: Any,
) -> OwnTask:
    """Return ``task=name`` with these arguments of its data function and other keys, of seed 0."""
    values = OmegaConf.load(FOLDER / "task" / f"{name}.yaml")
    keys |= {key: value for key, value in options.items() if key in NAMED}
    options = {key: value for key, value in options.items() if key not in NAMED}
    recipe = OmegaConf.create({"task": OmegaConf.merge(values, {"data_options": options}, keys)})
    plain: Any = OmegaConf.to_container(recipe, resolve=True)
    task = build_task(plain["task"], partition, seed=0, num_clients=clients)
    assert isinstance(task, OwnTask)
    return task

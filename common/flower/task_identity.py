"""Issue: apps that run without a SuperLink need an identity, a run and message ids of their own.

Uses: `flwr.supercore.task_identity.TaskIdentity`, without which no `Message` can be made;
`flwr.supercore.run.Run`, which the `Grid` interface speaks of; `Metadata._message_id`, which only
a SuperLink sets.
Releases: 1.39 to 1.42. Not needed when a `Message` can be made in a process of one's own:
`tests/test_flower_inside.py::test_a_message_needs_an_identity`.
"""

from __future__ import annotations

from flwr.app import Message
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

__all__ = ["Run", "empty_run", "set_identity", "set_message_id"]


def set_identity(run_id: int = 1, node_id: int = 1, task_id: int = 1) -> None:
    """Give this process the identity that Flower's ``Message`` requires."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, node_id, task_id


def empty_run() -> Run:
    """Return the description of a run without an app bundle."""
    return Run.create_empty(run_id=1)


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message its id, as Flower's grids do when they send it."""
    message.metadata.__dict__["_message_id"] = message_id

"""What every test needs: Flower's messages know the task they belong to."""

import torch
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
torch.set_num_threads(1)

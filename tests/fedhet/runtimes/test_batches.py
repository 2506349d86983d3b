"""How WorkerGrid puts tasks into messages: workers that only say how long they took."""

from collections.abc import Mapping, Sequence

import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedhet.runtimes.local.protocol import Answer, Federation, WorkerTask
from fedhet.runtimes.local.worker_grid import WorkerGrid


class StubWorkers:
    """Two workers that need so many seconds for an example; each ``wait`` answers one message."""

    def __init__(self, examples: Mapping[int, int], seconds: float) -> None:
        self.examples, self.seconds = examples, seconds
        self.sent: list[tuple[int, list[int]]] = []  # (worker, clients) of every message
        self.waiting: list[tuple[int, Sequence[WorkerTask]]] = []

    def __len__(self) -> int:
        return 2

    def forget(self) -> None:
        pass

    def place(self, record: object) -> object:
        return record

    def send(self, worker: int, tasks: Sequence[WorkerTask]) -> None:
        clients = [task.message.metadata.dst_node_id - 1 for task in tasks]
        self.sent.append((worker, clients))
        self.waiting.append((worker, tasks))

    def wait(self, timeout: float | None) -> list[tuple[int, list[Answer]]]:
        worker, tasks = self.waiting.pop(0)
        return [(worker, [self._answer(task) for task in tasks])]

    def _answer(self, task: WorkerTask) -> Answer:
        examples = self.examples[task.message.metadata.dst_node_id - 1]
        reply = Message(RecordDict(), reply_to=task.message)
        return Answer(reply, RecordDict(), examples, self.seconds * examples)


def rounds(workers: StubWorkers, clients: int) -> list[list[int]]:
    """Return the clients of each message of the second round, in the order of sending."""
    grid = WorkerGrid(workers, Federation("", {}, clients))
    for _ in range(2):
        workers.sent.clear()
        content = RecordDict({"config": ConfigRecord({"round": 1})})
        messages = [Message(content, node, MessageType.QUERY) for node in range(1, clients + 1)]
        assert len(list(grid.send_and_receive(messages))) == clients
    return [asked for _, asked in workers.sent]


@pytest.mark.parametrize("clients", [4, 10])
def test_a_short_round_is_one_message_to_each_worker(clients):
    workers = StubWorkers(dict.fromkeys(range(clients), 15), seconds=1e-4)
    assert sorted(map(len, rounds(workers, clients))) == [clients // 2] * 2


def test_long_clients_go_alone_and_the_longest_first():
    examples = {client: 100 + 10 * client for client in range(6)}
    assert rounds(StubWorkers(examples, seconds=1e-3), 6) == [[5], [4], [3], [2], [1], [0]]


def test_in_a_long_round_short_clients_share_messages_of_some_milliseconds():
    sizes = dict.fromkeys(range(40), 10)  # 1 ms each
    asked = rounds(StubWorkers({**sizes, 40: 5_000}, seconds=1e-4), 41)
    assert asked[0] == [40]
    assert {len(one) for one in asked[1:-2]} == {5}

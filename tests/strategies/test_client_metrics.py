"""What clients may report of metrics, and each client's own values in a row."""

import pytest
from flwr.app import Message, MessageType, RecordDict

from fedhet.strategies.base import RefusedReplyError
from fedhet.strategies.round.evaluation import ClientMetrics
from fedhet.strategies.round.round_report import RoundReport
from fedhet.strategies.wire.border import decode_evaluation
from fedhet.strategies.wire.records import METRICS, to_metrics
from tests.refused import refused

NAMES = ("f1", "f1/t-shirt", "mcc", "mae")


def decoded(**values):
    row = {"partition-id": 1, "num-examples": 5, **values}
    content = RecordDict({METRICS: to_metrics(row)})
    message = Message(content, dst_node_id=1, message_type=MessageType.EVALUATE)
    return decode_evaluation(message, 1, 5, NAMES)


def test_declared_metrics_in_their_ranges_pass():
    values = {"f1": 0.0, "f1/t-shirt": 1.0, "mcc": -1.0, "mae": 1e6}
    assert decoded(**values).items() >= values.items()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"f1": 1.5}, "f1=1.5 [0 1]"),
        ({"f1/t-shirt": -0.1}, "[0 1]"),
        ({"mcc": -1.1}, "[-1 1]"),
        ({"mae": -1.0}, "[0"),
        ({"mae": float("nan")}, "NaN"),
        ({"auroc": 0.5}, "auroc"),
        ({"f1/other": 0.5}, "f1/other"),
        ({"accuracy": 2.0}, "[0 1]"),
    ],
)
def test_others_are_refused(values, reason):
    with refused(*reason.split(), kind=RefusedReplyError):
        decoded(**values)


def test_a_row_has_each_clients_own_values_under_the_names_of_the_means():
    metrics = ClientMetrics(NAMES, per_client=True)
    trained = [(4, {"received-f1/t-shirt": 0.2, "train-loss": 1.0}), (2, {"received-loss": 3.0})]
    report = RoundReport(1)
    report.evaluation, report.client_evaluation = {"f1": 0.9}, {"f1": 0.3}
    report.per_client = metrics.of_training(trained)
    report.per_client |= metrics.of_evaluation([{"partition-id": 2, "f1": 0.3, "num-examples": 7}])
    row = report.row()
    assert (row["f1"], row["client_f1"]) == (0.9, 0.3)
    assert row["per_client"] == {
        "received_f1/t-shirt": {"4": 0.2},
        "received_loss": {"2": 3.0},
        "client_f1": {"2": 0.3},
    }
    assert ClientMetrics(NAMES).of_training(trained) == {}

"""What a simulated system charges for a transfer is what travels."""

import pytest
import torch
from torch import nn

from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.modes.systems import Constant
from fedhet.strategies.scaffold import SCAFFOLD
from fedhet.strategies.wire.compression import BFloat16, Compression, Int8, TopK
from tests.federation import Regression, federate
from tests.strategies.sides import built
from tests.strategies.test_fedbuff import LR, SIZE, STEPS, clients


class WithBuffer(Regression):
    """A regression with a buffer, which travels in full both ways, in single precision."""

    def __init__(self) -> None:
        super().__init__(2)
        self.body = nn.BatchNorm1d(2, affine=False, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD])
@pytest.mark.parametrize(
    "compression",
    [
        Compression(),
        Compression(up=BFloat16(), down="bfloat16"),
        Compression(up=Int8(), down="none"),
        Compression(up=TopK(share=0.5), down="int8"),
        Compression(up=None, down="int4"),
    ],
)
def test_a_round_takes_the_time_of_the_bytes_that_its_messages_have(method, compression):
    system = Constant(seconds_per_example=0.0, megabytes_per_second=1.0)
    buffers = [name for name, _ in WithBuffer().named_buffers()]
    how = {"system": system, "compression": compression, "buffers": buffers}
    strategy = built(method, local_lr=LR, local_training=STEPS, **how)
    _, reports = federate(strategy, clients(), model=WithBuffer, rounds=2, options=STEPS)
    before = 0.0
    for report in reports[1:]:
        moved = (report.bytes_up + report.bytes_down) / SIZE
        assert report.simulated_seconds - before == pytest.approx(moved / 1e6, abs=1e-12)
        before = report.simulated_seconds

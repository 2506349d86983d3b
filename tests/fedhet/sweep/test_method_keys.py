"""Keys that only the swept methods have, which Hydra's first composition does not know."""

import pytest

from fedhet.sweep.method_keys import with_single_sweeps
from tests.refused import refused

RHO = "strategy.sam.rho"


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (f"-m strategy=mofedsam,fedmrur {RHO}=0.02", f"{RHO}=choice(0.02)"),
        (f"--multirun strategy=[fedsam,fedavgm],mofedsam {RHO}=0.02", f"{RHO}=choice(0.02)"),
        (f"-m strategy=choice(fedsam,mofedsam) {RHO}=0.02", f"{RHO}=choice(0.02)"),
        ("-m partition=shards,shards partition.shards_per_client=3", "shards_per_client=choice(3)"),
        (f"-m strategy=mofedsam,fedmrur {RHO}=0.02,0.1", ""),  # a sweep already
        (f"-m strategy=fedsam {RHO}=0.02 seed=0,1", ""),  # composed with fedsam
        ("-m strategy=mofedsam,fedmrur local.lr=0.1 rounds=3", ""),  # of every recipe
        ("-m strategy=fedavg,fedprox strategy.personal=none", ""),  # of every method
        ("-m strategy=fedavg,fedprox strategy.sam.rhoo=1", ""),  # Hydra refuses it
        (f"strategy=fedsam {RHO}=0.02", ""),  # no sweep
    ],
)
def test_such_a_key_becomes_a_sweep_of_one_value(words, changed):
    before = words.split()
    after = with_single_sweeps(before)
    assert [word for word in after if word not in before] == [changed and after[-1]][
        : bool(changed)
    ]
    assert after[-1].endswith(changed)


@pytest.mark.parametrize("methods", ["fedavg,fedsam", "fedsam,[fedprox,fedavgm]"])
def test_a_key_that_only_some_of_the_methods_have_is_refused(methods):
    with refused(f"{RHO}=1", "fedsam"):
        with_single_sweeps(["-m", f"strategy={methods}", f"{RHO}=1"])

"""Which random numbers local training draws."""

import torch

from fedhet.strategies.components.local_training import seeded


def drawn(seed: int, round: int, client: int) -> list[float]:
    """Return a number of dropout's, one of the batches' and one of the sides'."""
    with seeded(seed, round, client, torch.device("cpu")) as generators:
        return [torch.rand((), generator=one).item() for one in (None, *generators)]


def test_every_run_round_and_client_draws_numbers_of_its_own():
    before = torch.get_rng_state()
    settings = [(0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (5, 1, 0)]
    numbers = [number for setting in settings for number in drawn(*setting)]
    assert len(set(numbers)) == 3 * len(settings)
    assert drawn(0, 1, 0) == numbers[:3]
    assert torch.equal(torch.get_rng_state(), before)

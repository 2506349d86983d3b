"""Colours of methods."""

from fedhet.report.colors import OWN_COLORS, PALETTE, keys_of


def test_known_methods_keep_their_colour_and_no_two_lines_look_alike():
    for lines in (
        [("fedavg", "fedavg")],
        [("new", "new"), ("fedavg", "fedavg")],
        [("fedpvr", "fedpvr"), ("FedAvg", "fedavg"), ("fedavg", "fedavg")],
    ):
        found = {key.color for label, key in keys_of(lines).items() if label.lower() == "fedavg"}
        assert found == {OWN_COLORS["fedavg"]}
    lines = [(f"method {n}", "fedprox" if n < 3 else f"m{n}") for n in range(2 * len(PALETTE))]
    keys = keys_of(lines).values()
    assert len({(key.color, key.dashed) for key in keys}) == 2 * len(PALETTE)

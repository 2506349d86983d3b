"""A method keeps its colour."""

from fedhet.report.colors import OWN_COLORS, PALETTE, THEME, keys_of


def test_known_methods_keep_their_colour_whatever_they_are_shown_with():
    for lines in (
        [("fedavg", "fedavg")],
        [("new", "new"), ("fedavg", "fedavg")],
        [("fedpvr", "fedpvr"), ("FedAvg", "fedavg"), ("new", "new")],
    ):
        found = keys_of(lines)
        own = next(key for label, key in found.items() if label.lower() == "fedavg")
        assert own.color == OWN_COLORS["fedavg"]


def test_no_two_lines_look_alike():
    lines = [(f"method {n}", "fedprox" if n < 3 else f"m{n}") for n in range(2 * len(PALETTE))]
    keys = keys_of(lines)
    assert len({(key.color, key.dashed) for key in keys.values()}) == 2 * len(PALETTE)


def test_one_method_in_two_tables_has_one_colour():
    keys = keys_of(
        [("FedAvg", "fedavg"), ("fedavg", "fedavg"), ("FedDW", "feddw"), ("feddw", "feddw")]
    )
    assert keys["FedAvg"].color == keys["fedavg"].color
    assert keys["FedDW"].color == keys["feddw"].color


def test_every_colour_can_be_seen_on_its_page():
    """WCAG asks for a contrast of 3 for graphics, 4.5 for text."""
    for pair in PALETTE:
        assert contrast(pair.light, "#ffffff") > 2.6
        assert contrast(pair.dark, "#14191f") > 4.5
    assert contrast(THEME["ink"].light, "#ffffff") > 7
    assert contrast(THEME["ink"].dark, "#14191f") > 7


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

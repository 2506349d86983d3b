"""Parameters of the networks for small devices, by the arithmetic of their papers' tables."""


def batch_norm(channels):
    return 2 * channels


def shuffle_unit(channels, new, groups):
    """A grouped 1x1 to a quarter, a 3x3 channel by channel, a 1x1 in two groups; each with norm."""
    narrow = new // 4
    squeeze = channels * narrow // groups + batch_norm(narrow)
    spatial = 9 * narrow + batch_norm(narrow)
    return squeeze + spatial + narrow * new // 2 + batch_norm(new)


def shufflenet_body():
    """A 1x1 stem to 24, then stages of 4, 8, 4 units whose first adds what is missing."""
    stem = 3 * 24 + batch_norm(24)
    first = shuffle_unit(24, 200 - 24, 1) + 3 * shuffle_unit(200, 200, 2)
    second = shuffle_unit(200, 400 - 200, 2) + 7 * shuffle_unit(400, 400, 2)
    third = shuffle_unit(400, 800 - 400, 2) + 3 * shuffle_unit(800, 800, 2)
    return stem + first + second + third


def inverted_residual(channels, wide, expansion):
    """A 1x1 to the expanded width unless that is the same, a 3x3 channel by channel, a 1x1."""
    hidden = channels * expansion
    expand = channels * hidden + batch_norm(hidden) if expansion > 1 else 0
    return expand + 9 * hidden + batch_norm(hidden) + hidden * wide + batch_norm(wide)


def mobilenetv2_body(shrink):
    """Sandler et al., CVPR 2018, Table 2, with all widths but the stem's divided."""
    total, channels = 3 * 32 * 9 + batch_norm(32), 32
    for expansion, width, blocks in (
        *((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4)),
        *((6, 96, 3), (6, 160, 3), (6, 320, 1)),
    ):
        for _ in range(blocks):
            total += inverted_residual(channels, width // shrink, expansion)
            channels = width // shrink
    return total + channels * (1280 // shrink) + batch_norm(1280 // shrink)

"""What the tests read of a section's blocks."""

from fedhet.report.blocks import Table


def by_type(blocks):
    return {type(block): block for block in blocks}


def texts_of(found):
    return [[entry.text for entry in row] for row in found[Table].rows]

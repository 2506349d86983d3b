"""Issue: Flower's log has to follow when a process replaces its standard streams.

Uses: `flwr.common.logger.console_handler`, which holds the stream of the process's start.
Releases: 1.39 to 1.42. Not needed when Flower's handler asks for `sys.stderr` at each line:
`tests/test_flower_inside.py::test_flowers_log_keeps_the_stream_of_the_start`.
"""

from typing import TextIO

from flwr.common.logger import console_handler


def write_log_to(stream: TextIO) -> None:
    """Let Flower's log write to this stream."""
    console_handler.setStream(stream)

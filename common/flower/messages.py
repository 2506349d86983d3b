"""Issue: a message that keeps another's metadata, and the codes of error replies.

Uses: `flwr.app.message.make_message`, because `Message(...)` makes new metadata;
`flwr.common.constant.ErrorCode`, because `Error.code` is a bare number in the documented API;
`SUPERLINK_NODE_ID`, from which errors for other nodes come.
Releases: 1.39 to 1.42. Not needed when `flwr.app` has both:
`tests/test_flower_inside.py::test_flower_has_no_public_way_to_copy_a_message`.
"""

from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode

__all__ = ["SUPERLINK_NODE_ID", "ErrorCode", "make_message"]

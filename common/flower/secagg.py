"""Issue: SecAgg+ is Flower's, but its parts are not exported.

Uses: `secaggplus_mod` (the client half) and its state; Flower's Shamir shares, key agreement,
encryption, masks and quantization; the records in which a NumPyClient's answer travels, which the
mod expects. The server half is fedhet's (strategies/modes/secure/workflow.py), because Flower's
ends the run with one bad client.
Releases: 1.39 to 1.42, whose modules for this have the same bytes. Not needed when
`flwr.clientapp.mod` has SecAgg+ for messages of any content:
`tests/test_flower_inside.py::test_flowers_message_api_has_no_secure_aggregation`.
"""

from flwr.client.mod.secure_aggregation.secaggplus_mod import SecAggPlusState, secaggplus_mod
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
    decrypt,
    generate_shared_key,
)
from flwr.common.secure_aggregation.quantization import dequantize
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)
from flwr.common.secure_aggregation.secaggplus_utils import (
    pseudo_rand_gen,
    share_keys_plaintext_separate,
)
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    public_key_to_bytes,
)

__all__ = [
    "RECORD_KEY_CONFIGS",
    "RECORD_KEY_STATE",
    "Key",
    "SecAggPlusState",
    "Stage",
    "bytes_to_private_key",
    "bytes_to_public_key",
    "combine_shares",
    "decrypt",
    "dequantize",
    "fitres_to_recorddict",
    "generate_shared_key",
    "pseudo_rand_gen",
    "public_key_to_bytes",
    "secaggplus_mod",
    "share_keys_plaintext_separate",
]

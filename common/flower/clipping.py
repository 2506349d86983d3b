"""Issue: Flower's clipping is only offered inside strategies and mods of its own.

Uses: functions of `flwr.supercore.differential_privacy`, the same that Flower's wrappers call.
Releases: 1.39 to 1.42. Not needed when `flwr.app` or `flwr.serverapp` exports them:
`tests/test_flower_inside.py::test_flower_exports_no_clipping`.
"""

from flwr.supercore.differential_privacy import (
    adaptive_clip_inputs_inplace,
    compute_adaptive_noise_params,
    get_norm,
)

__all__ = ["adaptive_clip_inputs_inplace", "compute_adaptive_noise_params", "get_norm"]

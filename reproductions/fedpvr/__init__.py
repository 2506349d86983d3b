"""FedPVR's figures: layer diagnostics."""

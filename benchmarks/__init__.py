"""Measurements of speed: ``python -m benchmarks NAME``, one module each."""

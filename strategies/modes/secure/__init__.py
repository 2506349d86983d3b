"""Secure aggregation."""

"""Secure aggregation and differential privacy."""

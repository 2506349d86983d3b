"""Attacks of hostile clients, to measure what a method and its aggregation stand."""

"""Federated methods: one file per paper, each a Flower Strategy with its two halves."""

"""One-shot fusion: projections, layer chains, alignment, image generators."""

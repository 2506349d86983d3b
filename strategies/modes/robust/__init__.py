"""Aggregation that a few hostile clients cannot steer."""

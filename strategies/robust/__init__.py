"""Aggregation that a few hostile clients cannot steer, and an alarm for updates that stand out."""

"""The ServerApp: composes the recipe, runs the strategy, evaluates, checkpoints, writes results."""

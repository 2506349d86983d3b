"""What a method may replace: aggregators, optimizers, samplers, schedules, outputs."""

"""runtime=deployment: submits a run to a SuperLink that already runs, and follows it."""

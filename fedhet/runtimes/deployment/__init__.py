"""runtime=deployment: a run on a SuperLink that is up already, submitted and followed from here."""

"""The `fedhet` command: from a recipe on the command line to a finished run and its results."""

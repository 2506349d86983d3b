"""Commands beside `fedhet`."""

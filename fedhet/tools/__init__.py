"""Commands beside `fedhet`: evaluate, export, partition, tune, conformal."""

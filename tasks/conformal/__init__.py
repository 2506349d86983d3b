"""Conformal prediction sets: scores, and calibration by clients' histograms."""

CALIBRATE = "calibrate"  # the action of the messages, and the record of what clients answer
LOG_LOSSES = "log-losses"

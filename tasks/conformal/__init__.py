"""Prediction sets: scores, and what clients send of them; here the names under which they do."""

CALIBRATE = "calibrate"  # the action of the messages, and the record of what clients answer
LOG_LOSSES = "log-losses"

"""Conformal prediction sets for finished runs: ``fedhet-conformal``."""

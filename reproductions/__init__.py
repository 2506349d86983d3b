"""Figures of single papers, one folder per paper; the report finds them by the paper's name."""

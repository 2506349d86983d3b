"""Figures of single papers, a package per paper; fedhet/report/paper_figures.py finds them."""

"""Data, model and method of this project."""

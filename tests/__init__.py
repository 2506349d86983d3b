"""Tests; they mirror the tree above."""

"""Sweeps: many runs by one command, with Hydra's multirun, in one folder and on one display.

The launcher process (session.py) watches a folder of small files, in which every job reports about
itself (folder.py, job.py), in whatever process or machine a Hydra launcher has started it.
"""

"""Sweeps: many runs by one command, with Hydra's multirun, in one folder and on one display.

Hydra's launchers start the jobs, in whatever process or on whatever machine (job.py). Each job
reports to small files in the sweep's folder (sweep_folder.py), which the launcher process reads and
shows (session.py).
"""

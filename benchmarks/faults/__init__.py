"""Faults of clusters (`ray_faults.py`) and of training scripts (`silent_bugs/`)."""

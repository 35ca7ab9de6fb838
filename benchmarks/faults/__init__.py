"""Faults for small runs, and what becomes of the runs: see `inject.py`."""

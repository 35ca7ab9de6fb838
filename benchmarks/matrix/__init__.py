"""Parity of expert-parallel libraries with one process."""

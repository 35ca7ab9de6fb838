"""Launching processes, checking what another launcher started, and exiting with a code."""

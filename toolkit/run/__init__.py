"""A run: folder, record of code and settings, and console output."""

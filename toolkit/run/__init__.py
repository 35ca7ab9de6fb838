"""A run: its folder, its record of code and settings, and what it prints."""

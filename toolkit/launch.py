"""Processes: starting those that were asked for, refusing a world that is not what was asked, leaving with a code."""

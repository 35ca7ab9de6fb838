"""Starting processes, checking that a launcher started those that were asked for, and leaving with an exit code."""

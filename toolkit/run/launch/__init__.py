"""Process launch, checks of other launchers, and exit codes."""

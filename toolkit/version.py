"""The version, alone in its file so that the build can read it."""

__version__ = "0.2.0"

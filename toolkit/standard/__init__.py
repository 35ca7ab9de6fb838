"""The usual trainer with the usual callbacks, wired from a config."""

"""A trainer with the usual callbacks, made from a config."""

"""The settings of a run: frozen dataclasses whose fields are the flags of a recipe."""

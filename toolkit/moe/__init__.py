"""The mixture-of-experts layer, whose experts are owned by ranks."""

"""The log of each layer's routing, and the metrics computed from it."""

"""How tokens were routed: counted once per layer, and the metrics read from that."""

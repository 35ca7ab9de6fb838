"""Models that several subjects share: single-device code, one family per file."""

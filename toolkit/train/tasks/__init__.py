"""Tasks that several subjects share: how a batch becomes a loss."""

"""Data sets as tables of tensors, and the order in which their rows are used."""

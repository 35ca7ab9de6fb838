"""`toolkit audit`: checks of any MoE checkpoint, without its model's code."""

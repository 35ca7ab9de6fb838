"""A grid of runs of one recipe, each in its own process and folder, with tables and plots of the results.

grid.py     axes, cells, and the digest that identifies a cell
cells.py    running cells: one after another or several at a time, continuing unfinished ones
search.py   Optuna over the same axes
"""

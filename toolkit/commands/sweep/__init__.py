"""A grid of runs of one recipe, each in a process and a folder of its own; tables and pictures of what came out.

grid.py     axes, cells, and the digest by which a cell is known
cells.py    running cells: one after another or several at a time, continuing what was begun
tables.py   rows, means and spreads
search.py   Optuna over the same axes
"""

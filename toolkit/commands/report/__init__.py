"""Finished and unfinished runs side by side: a table in the terminal, and a page that opens in a browser offline.

records.py      files of a run folder
compare.py      `toolkit compare`
comparison.py   settings that differ, and final numbers with their spread over seeds
processes.py    the same training at several world sizes
page.py         `toolkit report`, in Bokeh's layout
curves.py       metrics as curves of a bounded number of points
experts.py      load, placement and events of experts over steps
dashboard.py    `toolkit dashboard`: the same curves as a W&B workspace
"""

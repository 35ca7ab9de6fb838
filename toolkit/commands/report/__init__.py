"""Finished and unfinished runs side by side: a table in the terminal, and a page that opens in a browser offline.

records.py      what the folder of a run holds
comparison.py   settings that differ, and final numbers with their spread over seeds
processes.py    the same training in one process and in several
curves.py       metrics as curves of a bounded number of points
experts.py      load, placement and events of experts over steps
page.py         the HTML file; page.html, page.css and page.js are its frame
workspace.py    the same sheet for W&B
model_folder.py what `toolkit push` uploads of one run
model_card.py   the README.md in it
"""

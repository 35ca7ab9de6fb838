"""Tables in Markdown."""

from toolkit.run.markdown import markdown_table

ROWS = [["name", "loss"], ["a", "0.125"], ["x|y", ""]]


def test_a_bar_in_a_cell_does_not_end_it():
    assert markdown_table(ROWS) == "| name | loss |\n|---|---|\n| a | 0.125 |\n| x\\|y |  |\n"


def test_columns_may_have_even_width():
    aligned = markdown_table(ROWS, aligned=True)
    assert aligned == "| name | loss  |\n|------|-------|\n| a    | 0.125 |\n| x\\|y |       |\n"

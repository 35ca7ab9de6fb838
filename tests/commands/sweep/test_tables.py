"""Tables of runs that are given."""

from toolkit.run.runs_table import tabulate


def test_a_setting_with_a_bar_keeps_the_columns():
    runs = [(name, {"pattern": name}, {"test_loss": 0.5}) for name in ("a|b", "c")]
    assert "| a\\|b | 1 | 0.5 |" in tabulate(runs).markdown()


def test_a_row_of_means_has_its_runs():
    found = [(f"{lr}-{seed}", {"lr": lr, "seed": seed}, {"test_loss": lr}) for seed in (0, 1) for lr in (0.1, 0.2)]
    table = tabulate(found)
    runs = {mean["lr"]: [run["digest"] for run in table.runs_of(mean)] for mean in table.means()}
    assert runs == {0.1: ["0.1-0", "0.1-1"], 0.2: ["0.2-0", "0.2-1"]}

import json

import pytest

from benchmarks.learning import continual_learning as benchmark
from benchmarks.learning.continual_learning import (
    Cell,
    best_strength,
    cells,
    drift_table,
    scores_table,
    train,
    verdicts,
)
from toolkit.run.tracking.jsonl import to_json


def run(stream: str, arm: str, seed: int, accuracy: float, **more: object) -> dict[str, object]:
    names = ("forgetting", "forward_transfer", "learning_accuracy")
    scores = {"average_accuracy": accuracy} | dict.fromkeys(names, 0.5)
    return {"stream": stream, "arm": arm, "seed": seed, "strength": None, **scores, **more}


@pytest.mark.parametrize(("stream", "arm"), [("split", "dynamic"), ("split, task", "elastic weights")])
def test_a_cell_is_trained_on_the_embedded_digits(stream, arm):
    cell = Cell(stream=stream, arm=arm, seed=1, strength=10.0 if arm == "elastic weights" else None)
    result = json.loads(to_json(train(cell, dataset="digits")))
    assert (result["stream"], result["arm"], result["seed"]) == (stream, arm, 1)
    assert len(result["accuracy_matrix"]) == len(result["task_ends"]) == 5
    assert 0.3 < result["learning_accuracy"] <= 1
    if arm == "dynamic":
        assert result["lifecycle_sleep"] >= 5


def test_strengths_are_chosen_on_seeds_that_no_table_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "CELLS", tmp_path)
    trained = []
    for cell in cells({"permuted": ["elastic weights"]}, range(2)):
        trained.append((cell.seed, cell.strength))
        accuracy = 0.9 if cell.strength == 100 else 0.5
        cell.file.write_text(
            json.dumps(run("permuted", "elastic weights", cell.seed, accuracy, strength=cell.strength))
        )
    assert trained == [*((100, strength) for strength in benchmark.STRENGTHS), (0, 100.0), (1, 100.0)]
    assert best_strength("permuted") == 100
    ((key, runs),) = benchmark.collect().items()
    assert key == ("permuted", "elastic weights")
    assert [each["seed"] for each in runs] == [0, 1]


def test_means_that_differ_by_two_standard_errors_are_told_apart():
    def arm(name: str, *accuracies: float) -> tuple[tuple[str, str], list[dict[str, object]]]:
        return ("split", name), [run("split", name, seed, value) for seed, value in enumerate(accuracies)]

    # Standard deviations of 0.01 over four seeds: standard errors of 0.5 points, 0.7 of the difference.
    near = (0.0087, -0.0087, 0.0087, -0.0087)
    results = dict(
        [
            arm("dynamic", *(0.9 + d for d in near)),
            arm("replay", *(0.89 + d for d in near)),
            arm("fine-tuning", *(0.88 + d for d in near)),
            arm("joint", *(0.92 + d for d in near)),
        ]
    )
    table = verdicts(results, "dynamic")
    assert [(row["beside"], row["difference, points"], row["verdict"]) for row in table] == [
        ("replay", "+1.0", "equal"),
        ("fine-tuning", "+2.0", "better"),
        ("joint", "-2.0", "worse"),
    ]
    assert {row["standard error"] for row in table} == {"0.7"}
    scores = {row["arm"]: row for row in scores_table(results)}
    assert scores["dynamic"]["average accuracy %"] == "90.0 (1.0)"
    assert scores["joint"]["forgetting %"] == "", "who learns all at once forgets nothing"


def test_an_alarm_is_of_the_change_before_it_once():
    runs = [run("split", "fixed mixture", 0, 0.9, task_ends=[100, 200, 300], drift_alarms=[50, 110, 150, 290])]
    (row,) = drift_table({("split", "fixed mixture"): runs})
    assert (row["changes"], row["noticed"], row["false alarms"]) == (2, 2, 2)
    assert row["steps until noticed, median"] == 50  # of 10 and 90


def test_tables_take_the_place_of_older_ones(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(benchmark.PAGE.read_text())
    monkeypatch.setattr(benchmark, "PAGE", page)
    for accuracy in (1, 2):
        benchmark.write_page({"drift": [{"arm": "replay", "percent": accuracy}]})
    comment = "<!-- figures: continual_learning_drift.json -->\n"
    table = f"{comment}| arm | percent |\n|---|---|\n| replay | 2 |\n"
    assert page.read_text().count(f"**{benchmark.TITLES['drift']}**\n\n{table}") == 1
    assert "| replay | 1 |" not in page.read_text()
    assert page.read_text().startswith("# Train on a sequence of tasks\n")
    assert page.read_text().rstrip().endswith("was not measured.")

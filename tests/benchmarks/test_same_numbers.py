import json
import math

from benchmarks.same_numbers import Configuration, compare_runs, differences, may_differ

LOSS = 0.1
LINE = {"step": 10, "train/loss": LOSS, "moe/load/block": [0.5, 0.25], "perf/step_time_ms": 2.0}


def found(before, now, renamed=None):
    return list(differences([before], [now], renamed or {}))


def test_a_changed_last_bit_is_found():
    assert found(LINE, dict(LINE)) == []
    after = math.nextafter(LOSS, 1)
    assert found(LINE, LINE | {"train/loss": after}) == [f"step 10: train/loss: {LOSS!r} before, {after!r} now"]
    assert len(found(LINE, LINE | {"moe/load/block": [0.5, math.nextafter(0.25, 0)]})) == 1
    assert len(found({"loss": 0.0}, {"loss": -0.0})) == 1
    assert found({"loss": math.nan}, {"loss": math.nan}) == []


def test_timings_are_not_compared_and_counts_are():
    assert found(LINE, LINE | {"perf/step_time_ms": 3.0}) == []
    results = {"train_seconds": 1.0, "samples_per_second": 2.0, "peak_memory_bytes": 3, "finished_at": "a"}
    assert found(results, dict.fromkeys(results, 0)) == []
    assert not may_differ("moe/all_to_all_bytes_per_step")
    assert not may_differ("samples")


def test_a_renamed_key_is_mapped_and_its_value_still_compared():
    renamed = {r"moe/load/(.*)": r"moe/expert_load/\1", "placement/(.*)": r"final_placement/\1"}
    before = {"moe/load/block": [1, 2], "placement": {"block": [[0], [1]]}}
    now = {"moe/expert_load/block": [1, 2], "final_placement": {"block": [[0], [1]]}}
    assert found(before, now, renamed) == []
    assert found(before, now | {"moe/expert_load/block": [1, 3]}, renamed) == [
        "moe/expert_load/block: [1, 2] before, [1, 3] now"
    ]
    assert found(before, now) == [
        "only before: moe/load/block, placement/block",
        "only now: final_placement/block, moe/expert_load/block",
    ]


def test_a_missing_line_is_a_difference():
    assert list(differences([LINE, LINE], [LINE], {})) == ["2 lines before, 1 now"]


def test_both_files_of_a_run_are_compared_and_one_that_failed_is_no_equal(tmp_path):
    before, now = tmp_path / "before", tmp_path / "now"
    for folder in (before, now):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(f"{json.dumps(LINE)}\n" * 2)
        (folder / "results.json").write_text(json.dumps({"test_loss": LOSS}, indent=2))
    assert compare_runs(before, now, {}) == []
    (now / "results.json").write_text(json.dumps({"test_loss": 0.2}))
    assert compare_runs(before, now, {}) == ["test_loss: 0.1 before, 0.2 now"]
    (now / "error.txt").write_text("exit code 2: no such flag\n")
    assert compare_runs(before, now, {}) == ["did not run now: exit code 2: no such flag"]
    assert compare_runs(before, tmp_path / "other", {}) == ["no record of now"]


def test_the_older_revision_is_given_its_own_words(tmp_path):
    configuration = Configuration("a run", ("recipes/new.py", "--swap", "--gone", "--run-dir", "FOLDER"))
    renamed = {"recipes/new.py": "recipes/old.py", "--swap": "--replan.planner swap", "--gone": ""}
    assert configuration.command(tmp_path, renamed)[1:] == [
        "recipes/old.py",
        *("--replan.planner", "swap"),
        *("--run-dir", str(tmp_path)),
    ]
    assert configuration.command(tmp_path, {})[1:3] == ["recipes/new.py", "--swap"]

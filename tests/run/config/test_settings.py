"""Comparison of settings by dotted name."""

from toolkit.run.config.settings import decides_what_is_learned, differing_names


def test_differing_names_ignores_settings_that_one_run_lacks():
    found = [{"lr": 0.1, "seed": 0, "betas": [1, 2]}, {"lr": 0.2, "seed": 0, "betas": [1, 2], "new": 3}]
    assert differing_names(found) == ["lr"]
    assert differing_names([{"flag": True}, {"flag": 1}]) == ["flag"], "JSON distinguishes true and 1"
    assert differing_names([]) == []


def test_folders_and_checkpoints_do_not_decide_learning():
    assert all(map(decides_what_is_learned, ("lr", "optimizer", "optimizer.weight_decay")))
    assert not any(map(decides_what_is_learned, ("run_dir", "checkpoint", "checkpoint.keep_last")))

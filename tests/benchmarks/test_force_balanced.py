from benchmarks.speed.force_balanced import Speed, row, speed


def test_a_runs_speed_is_the_median_of_its_settled_lines():
    lines = [
        {"step": step, "perf/samples_per_second": rate, "moe/rank_imbalance": rate / 100}
        for step, rate in ((10, 900.0), (20, 100.0), (30, 120.0), (40, 500.0))
    ]
    only_evaluated = {"step": 40, "eval/accuracy": 0.5}
    assert speed([*lines, only_evaluated], after=10) == Speed(120.0, 1.2)


def test_a_fraction_is_taken_within_each_round():
    # The machine was half as fast in the second round: the fractions do not see it.
    rounds = [
        (Speed(80.0, 1.5), Speed(100.0, 1.0)),
        (Speed(45.0, 1.7), Speed(50.0, 1.0)),
        (Speed(70.0, 1.6), Speed(100.0, 1.0)),
    ]
    found = row("skewed", rounds)
    assert (found["fraction of forced"], found["least to greatest"]) == (0.8, "0.700 to 0.900")
    assert (found["imbalance"], found["imbalance, forced"], found["samples/s"]) == (1.6, 1.0, 70)

"""Planning where experts are: pure functions of loads and placements, without processes."""

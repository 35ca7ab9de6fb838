import pytest

from continual.evaluation import AccuracyMatrix

MATRIX = AccuracyMatrix(
    before=[0.1, 0.2, 0.1],
    after=[
        [0.9, 0.3, 0.2],
        [0.7, 0.8, 0.4],
        [0.5, 0.9, 1.0],
    ],
)


def test_scores_are_those_worked_out_by_hand():
    scores = MATRIX.scores()
    assert scores["average_accuracy"] == pytest.approx((0.5 + 0.9 + 1.0) / 3)
    # Task 1 was at best 0.9 and ends at 0.5; task 2 was at 0.8 and ends at 0.9: it gained.
    assert scores["forgetting"] == pytest.approx((0.4 - 0.1) / 2)
    # Task 2 before it was learned 0.3 instead of 0.2, task 3 then 0.4 instead of 0.1.
    assert scores["forward_transfer"] == pytest.approx((0.1 + 0.3) / 2)
    assert scores["learning_accuracy"] == pytest.approx((0.9 + 0.8 + 1.0) / 3)


@pytest.mark.parametrize("after", [[[0.9, 0.3]], [[0.9], [0.8]], [[0.9, 0.3], [0.9, 0.8], [0.7, 0.7]]])
def test_a_matrix_that_is_not_square_is_refused(after):
    with pytest.raises(ValueError, match="after each of them"):
        AccuracyMatrix(before=[0.1, 0.1], after=after)

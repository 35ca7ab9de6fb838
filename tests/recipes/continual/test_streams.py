import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from continual.streams import (
    TaskOrder,
    TaskStream,
    permuted_stream,
    rotate,
    rotated_stream,
    split_stream,
)
from toolkit.data.batches import TrainBatches
from toolkit.data.images import ImageData
from toolkit.data.table import TensorTable
from toolkit.errors import UserError


def images(count: int, seed: int) -> TensorTable:
    draws = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, 28, 28), generator=draws, dtype=torch.uint8)
    return TensorTable(input=pixels, label=torch.arange(count) % 10)


DATA = ImageData("made up", images(100, 0), images(50, 1), mean=0.5, std=0.3)


def labels_of_tasks(stream: TaskStream) -> list[set[int]]:
    return [set(test.columns["label"].tolist()) for test in stream.tests]


def test_classes_are_split_in_order_and_every_image_has_one_task():
    stream = split_stream(DATA)
    assert labels_of_tasks(stream) == [{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}]
    assert stream.sizes == (20,) * 5
    assert (stream.train.columns["label"] // 2).equal(stream.train.columns["task"])
    assert stream.train.columns["task"].equal(torch.arange(5).repeat_interleave(20))
    assert sum(map(len, stream.tests)) == 50
    assert stream.num_classes == 10
    assert stream.classes is None


def test_tasks_can_be_made_equally_long():
    stream = split_stream(DATA, samples_per_task=15)
    assert stream.sizes == (15,) * 5
    assert len(stream.tests[0]) == 10, "held-out data stay whole"


def test_the_scenario_says_what_an_answer_is():
    domain, task = split_stream(DATA, scenario="domain"), split_stream(DATA, scenario="task")
    assert labels_of_tasks(domain) == [{0, 1}] * 5
    assert domain.num_classes == 2
    assert labels_of_tasks(task) == labels_of_tasks(split_stream(DATA))
    assert task.classes == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))


def test_a_permuted_task_has_the_same_order_of_pixels_in_training_and_test():
    stream = permuted_stream(DATA, seed=3, num_tasks=3)
    assert stream.sizes == (100,) * 3
    plain, images = DATA.test.columns["input"], [test.columns["input"] for test in stream.tests]
    assert images[0].equal(plain)
    assert not images[1].equal(plain)
    # Where each pixel went, found from the test images, explains the training images.
    where = (images[1].flatten(1)[:, :, None] == plain.flatten(1)[:, None, :]).all(0).float().argmax(1)
    train = stream.train.columns["input"][100:200].flatten(1)
    assert train.equal(DATA.train.columns["input"].flatten(1)[:, where])
    assert permuted_stream(DATA, seed=3).train.columns["input"][:300].equal(stream.train.columns["input"])
    assert not permuted_stream(DATA, seed=4).tests[1].columns["input"].equal(images[1])


def test_divided_images_are_in_one_task_each():
    stream = rotated_stream(DATA, seed=0, degrees_per_task=0.0, divided=True)
    assert stream.sizes == (20,) * 5
    assert [len(test) for test in stream.tests] == [10] * 5
    divided = {image.numpy().tobytes() for image in stream.train.columns["input"]}
    assert divided == {image.numpy().tobytes() for image in DATA.train.columns["input"]}


def test_a_quarter_turn_moves_each_pixel_to_its_place():
    plain = DATA.train.columns["input"]
    assert rotate(plain, 90.0).equal(torch.rot90(plain, 1, (1, 2)))
    assert rotate(plain, 0.0) is plain
    stream = rotated_stream(DATA, seed=0, num_tasks=3, degrees_per_task=90.0)
    assert stream.tests[2].columns["input"].equal(torch.rot90(DATA.test.columns["input"], 2, (1, 2)))


def test_a_small_turn_keeps_a_blot_in_the_middle_and_moves_its_arm_upwards():
    plain = torch.zeros(1, 28, 28, dtype=torch.uint8)
    plain[0, 13:15, 13:27] = 255  # an arm to the right
    turned = rotate(plain, 30.0)[0]
    assert turned[13:15, 13:15].float().mean() > 200
    assert turned[:13].sum() > 20 * turned[15:].sum()


@pytest.mark.parametrize("tasks", [0, 1, 3, 20])
def test_classes_that_cannot_be_split_so_are_refused(tasks):
    with pytest.raises(UserError, match=f"num_tasks={tasks}: take two or more"):
        split_stream(DATA, num_tasks=tasks)


@given(
    sizes=st.lists(st.integers(1, 17), min_size=1, max_size=4),
    batch_size=st.integers(1, 7),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_tasks_come_one_after_another_each_example_once_per_epoch(sizes, batch_size, epochs, seed):
    order = TaskOrder(sizes=tuple(sizes), batch_size=batch_size, seed=seed, epochs_per_task=epochs)
    total = 2 * order.steps_per_epoch
    batches = order.batches(0)
    steps = [next(batches) for _ in range(total)]
    expected = [task for _ in range(2) for task, size in enumerate(sizes) for _ in range(size * epochs)]
    tasks = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    assert tasks[torch.cat(steps)].tolist() == expected
    assert torch.cat(steps).bincount().tolist() == [2 * epochs] * sum(sizes)
    visits = torch.cat([rows + order.epoch_of(step) * sum(sizes) for step, rows in enumerate(steps)])
    assert visits.sort().values.equal(torch.arange(2 * epochs * sum(sizes))), "each visit happens once"
    seen = 0
    for step in range(total):
        assert order.samples_before(step) == seen
        seen += len(steps[step])
        assert next(order.batches(step)).equal(steps[step]), "a run that continues goes on with the same batches"
    ends = [0, *order.task_ends]
    for task, (first, last) in enumerate(itertools.pairwise(ends)):
        assert {int(t) for t in tasks[torch.cat(steps[first:last])]} == {task}


def test_an_epoch_of_a_task_is_shuffled_anew_and_tasks_are_shuffled_differently():
    order = TaskOrder(sizes=(20, 20), batch_size=20, seed=0, epochs_per_task=2)
    batches = order.batches(0)
    first, second, other, _ = (next(batches) for _ in range(4))
    assert not first.equal(second)
    assert not first.equal(other - 20)


def rows_of_each_step(rank: int, world_size: int) -> list[list[int]]:
    stream = split_stream(DATA)
    order = TaskOrder(sizes=stream.sizes, batch_size=8, seed=0)
    where = {"rank": rank, "world_size": world_size}
    batches = TrainBatches(stream.train, batch_size=8, seed=0, accumulation=2, order=order, **where)
    rows = batches.rows(0)
    return [next(rows).tolist() for _ in range(2 * batches.steps_per_epoch)]


def test_every_step_sees_the_same_examples_on_one_process_and_on_four():
    whole = rows_of_each_step(0, 1)
    parts = [rows_of_each_step(rank, 4) for rank in range(4)]
    assert [list(itertools.chain(*pieces)) for pieces in zip(*parts, strict=True)] == whole

"""The digest of a sample does not depend on its batch."""

import torch
from torch import Tensor, nn

from toolkit.doctor.record import sample_digests


def pad(rows: list[Tensor], value: float) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def digests(inputs: list, **labels: Tensor) -> list:
    return sample_digests(nn.Identity(), inputs, labels)


def test_sample_digests_ignore_padding_with_zeros():
    short, long = torch.randn(3, 2), torch.randn(5, 2)
    first, second = digests([pad([short, long], 0)])
    assert [first] == digests([short[None]])
    assert first != second


def test_sample_digests_ignore_labels_that_the_loss_ignores():
    labels = [torch.tensor([4, 0, 0]), torch.tensor([4, 0, 0, 0, 7])]
    padded = digests([], labels=pad(labels, -100))
    assert padded == [digest for row in labels for digest in digests([], labels=row[None])]
    assert len(set(padded)) == 2


def test_sample_digests_with_a_mask_ignore_padding_of_any_value():
    ids, mask = torch.tensor([[9, 9, 4, 5], [1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    masked = digests([{"input_ids": ids, "attention_mask": mask}])
    assert masked[:1] == digests([{"input_ids": ids[:1, 2:], "attention_mask": mask[:1, 2:]}])

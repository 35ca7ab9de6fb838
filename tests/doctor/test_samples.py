"""A sample is the same whatever batch it came in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from toolkit.doctor.record import sample_digests


def pad(rows: list[Tensor], value: float) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def test_padding_belongs_to_the_batch_and_not_to_a_sample():
    short, long, model = torch.randn(3, 2), torch.randn(5, 2), nn.Identity()
    together, alone = sample_digests(model, [pad([short, long], 0)], {}), sample_digests(model, [short[None]], {})
    assert together[0] == alone[0]
    assert together[0] != together[1]


def test_labels_are_padded_with_what_the_loss_ignores():
    labels = [torch.tensor([4, 0, 0]), torch.tensor([4, 0, 0, 0, 7])]
    model = nn.Identity()
    padded = sample_digests(model, [], {"labels": pad(labels, -100)})
    assert padded == [digest for row in labels for digest in sample_digests(model, [], {"labels": row[None]})]
    assert len(set(padded)) == 2


def test_sample_digests_with_a_mask_ignore_padding_of_any_value():
    ids, mask = torch.tensor([[9, 9, 4, 5], [1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    masked = sample_digests(nn.Identity(), [{"input_ids": ids, "attention_mask": mask}], {})
    alone = {"input_ids": ids[:1, 2:], "attention_mask": mask[:1, 2:]}
    assert masked[0] == sample_digests(nn.Identity(), [alone], {})[0]

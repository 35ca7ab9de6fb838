"""Batches cut into smaller batches."""

import torch


def pieces(batch, sizes):
    """Cut the columns of `batch` into batches of `sizes` samples."""
    columns = zip(*(column.split(sizes) for column in batch.values()), strict=True)
    return [dict(zip(batch, piece, strict=True)) for piece in columns]


def assert_sum_over_samples(task, model, batch, sizes):
    """Assert that losses of pieces add up, and that an empty piece gives every parameter a gradient."""
    together, parts = task.loss(model, batch), [task.loss(model, piece) for piece in pieces(batch, sizes)]
    torch.testing.assert_close(together.sum, sum(part.sum for part in parts), rtol=1e-5, atol=1e-8)
    assert together.count == sum(part.count for part in parts) == task.count(batch) == sum(sizes)
    parts[sizes.index(0)].sum.backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())

"""Encoders of windows: views by mode, pretrained weights."""

import pytest
import safetensors.torch
import torch
from torch import nn

from activity.window_models import WindowClassifier, WindowEncoder, load_encoder, view_channels
from toolkit.errors import UserError

MEAN, STD = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 8.0])


def classifier(mode):
    torch.manual_seed(0)
    encoder = WindowEncoder(view_channels(mode, 3), width=8)
    return WindowClassifier(encoder, nn.Linear(encoder.width_out, 5), mode=mode, mean=MEAN, std=STD)


VIEWS = {
    "all_channels": [[[1.0, 1.0], [2.0, 2.0], [6.0, 9.0]]],
    "flatten": [[[1.0, 1.0]], [[2.0, 2.0]], [[6.0, 9.0]]],
    "average": [[[3.0, 4.0]]],
    "first": [[[1.0, 1.0]]],
}


@pytest.mark.parametrize("mode", VIEWS)
def test_mode_selects_views_and_every_batch_size_gives_gradients(mode):
    model = classifier(mode)
    windows = MEAN[:, None] + STD[:, None] * torch.tensor([[[1.0, 1.0], [2.0, 2.0], [6.0, 9.0]]])
    assert model.views(windows)[0].tolist() == VIEWS[mode]
    for batch in (0, 1, 4):
        logits = model(torch.randn(batch, 3, 40))
        assert logits.shape == (batch, len(VIEWS[mode]), 5)
        model.zero_grad()
        logits.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_logits_of_channel_do_not_depend_on_other_channels():
    model, windows = classifier("flatten"), torch.randn(2, 3, 64)
    changed = windows.clone()
    changed[:, 1] += 1
    before, after = model(windows), model(changed)
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
    assert not torch.equal(before[:, 1], after[:, 1])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other", r"stem.0.weight is \(8, 1, 7\) and the file has one of \(8, 3, 7\): take one of"),
        ("text", "encoder_path=.*text.safetensors': it cannot be read as safetensors"),
        ("absent", "encoder_path=.*absent.safetensors': it cannot be read as safetensors"),
    ],
)
def test_load_encoder_with_unsuitable_file_raises(tmp_path, name, message):
    safetensors.torch.save_file(classifier("all_channels").state_dict(), tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(UserError, match=message):
        load_encoder(classifier("flatten"), tmp_path / f"{name}.safetensors")

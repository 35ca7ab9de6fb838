"""Windows through an encoder: what each mode shows it, batches of any size, and encoders that change hands."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import nn

from activity.window_models import WindowClassifier, WindowEncoder, load_encoder, view_channels
from toolkit.errors import UserError

MEAN, STD = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 8.0])


def classifier(mode: str, width: int = 8) -> WindowClassifier:
    torch.manual_seed(0)
    encoder = WindowEncoder(view_channels(mode, 3), width=width)
    return WindowClassifier(encoder, nn.Linear(encoder.width_out, 5), mode=mode, mean=MEAN, std=STD)


def test_each_mode_shows_the_channels_its_own_way():
    windows = MEAN[:, None] + STD[:, None] * torch.tensor([[[1.0, 1.0], [2.0, 2.0], [6.0, 9.0]]])
    views = {
        mode: classifier(mode).views(windows)[0].tolist() for mode in ("all_channels", "flatten", "average", "first")
    }
    assert views["all_channels"] == [[[1.0, 1.0], [2.0, 2.0], [6.0, 9.0]]]
    assert views["flatten"] == [[[1.0, 1.0]], [[2.0, 2.0]], [[6.0, 9.0]]]
    assert views["average"] == [[[3.0, 4.0]]]
    assert views["first"] == [[[1.0, 1.0]]]


@pytest.mark.parametrize(("mode", "views"), [("all_channels", 1), ("flatten", 3), ("average", 1), ("first", 1)])
@pytest.mark.parametrize("batch", [0, 1, 4])
def test_logits_have_a_row_per_view_and_every_parameter_a_gradient_even_without_windows(mode, views, batch):
    model = classifier(mode)
    logits = model(torch.randn(batch, 3, 40))
    assert logits.shape == (batch, views, 5)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_window_gets_the_same_answer_alone_and_in_any_batch():
    model, windows = classifier("flatten"), torch.randn(6, 3, 128)
    alone = torch.cat([model(window[None]) for window in windows])
    torch.testing.assert_close(model(windows), alone, rtol=1e-5, atol=1e-6)


def test_the_answer_to_one_channel_does_not_depend_on_the_others():
    model, windows = classifier("flatten"), torch.randn(2, 3, 64)
    changed = windows.clone()
    changed[:, 1] += 1
    before, after = model(windows), model(changed)
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
    assert not torch.equal(before[:, 1], after[:, 1])


def test_an_encoder_is_taken_over_from_another_models_weights(tmp_path):
    trained, fresh = classifier("flatten"), classifier("flatten")
    for parameter in fresh.parameters():
        nn.init.normal_(parameter)
    safetensors.torch.save_file(trained.state_dict(), tmp_path / "model.safetensors")
    load_encoder(fresh, tmp_path / "model.safetensors")
    x = torch.randn(2, 1, 64)
    assert torch.equal(fresh.encoder(x), trained.encoder(x))
    assert not torch.equal(fresh.head.weight, trained.head.weight)


def test_an_encoder_that_does_not_fit_is_refused(tmp_path):
    safetensors.torch.save_file(classifier("all_channels").state_dict(), tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(
        UserError, match=r"stem.0.weight is \(8, 1, 7\) and the file has one of \(8, 3, 7\): take one of"
    ):
        load_encoder(classifier("flatten"), tmp_path / "other.safetensors")
    for name in ("text.safetensors", "absent.safetensors"):
        with pytest.raises(UserError, match=f"encoder_path=.*{name}': it cannot be read as safetensors"):
            load_encoder(classifier("flatten"), tmp_path / name)

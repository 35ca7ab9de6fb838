"""Recognises activities from a motion sensor, on people who are not in the training data.

python recipes/har.py --fold 1      windows of 4 s, the volunteers of that fold held out; a minute or two on a CPU
python recipes/har.py --num-processes 4 --batch-size 128 --scale-lr 32 --schedule.warmup-epochs 2
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

import toolkit as tk

if TYPE_CHECKING:
    import torch
    from torch import nn

    from activity.activity import ActivityData


class Config(tk.RunConfig):
    """The settings of a run; fields shared with other recipes are inherited."""

    mode: Literal["all_channels", "flatten", "average", "first"] = "all_channels"
    """Input of the encoder: all channels; each by itself, averaged over the window; their mean; the
    first."""
    window_seconds: Annotated[float, Field(ge=1, le=60)] | None = None
    """Length of a window; None means 4 s, or the publisher's windows."""
    rate_hz: PositiveFloat | None = None
    """Readings per second of a data set of your own."""
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Fraction of a window that the next one shares; windows never span two trials."""
    fold: NonNegativeInt | None = None
    """Fold of held-out volunteers. None: the official split, or fold 0."""
    folds: Annotated[int, Field(ge=2)] = 5
    """Parts into which volunteers are divided."""
    width: Annotated[int, Field(ge=8, multiple_of=8)] = 16
    """Channels of the encoder's first convolution; the last has four times as many."""
    hidden_dims: tuple[PositiveInt, ...] = ()
    """Hidden layers of the classifier behind the encoder."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the classifier."""
    class_balance: Literal["none", "sqrt", "inverse"] = "none"
    """Weight of a class in the loss: 1, or one over (the root of) its number of training windows."""
    encoder_path: Path | None = None
    """Start from the encoder in this model.safetensors, of a run with the same mode and width."""
    freeze_encoder: bool = False
    """Train only the classifier behind it."""

    def check_together(self) -> None:
        super().check_together()
        fits = self.fold is None or self.fold < self.folds
        tk.require(fits, "fold", self.fold, f"take 0 to {self.folds - 1}")
        fits = not self.freeze_encoder or self.encoder_path is not None
        tk.require(fits, "freeze_encoder", True, "say which encoder with encoder_path, or train it")


def full() -> Config:
    """The published run: all channels at once."""
    return Config(epochs=12, lr=2e-3, dropout=0.3)


def debug() -> Config:
    """Seconds: generated signals, a small encoder."""
    return full().replace(dataset="generated", epochs=4, lr=4e-3, width=8, dropout=0.0, log_every=5)


def flatten() -> Config:
    """Each channel by itself, judged by vote: of a wrist's three, 4 epochs are as many inputs as 12 of other modes."""
    return full().replace(mode="flatten", epochs=4)


def average() -> Config:
    """The mean of all channels."""
    return full().replace(mode="average")


def first() -> Config:
    """The first channel alone."""
    return full().replace(mode="first")


def build_model(config: Config, data: ActivityData) -> nn.Module:
    """Build a convolutional encoder of windows and a classifier on top of it."""
    from torch import nn

    from activity.window_models import WindowClassifier, WindowEncoder, load_encoder, view_channels

    encoder = WindowEncoder(view_channels(config.mode, data.num_channels), width=config.width)
    classifier = tk.MLP(encoder.width_out, *config.hidden_dims, len(data.classes))
    head = nn.Sequential(nn.Dropout(config.dropout), classifier)
    model = WindowClassifier(encoder, head, mode=config.mode, mean=data.mean, std=data.std)
    if config.encoder_path is not None:
        load_encoder(model, config.encoder_path)
    encoder.requires_grad_(not config.freeze_encoder)
    return model


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Return `--optimizer.kind`, or any other optimizer of the model's parameters."""
    return tk.build_optimizer(model, config)


def main(config: Config) -> dict[str, Any]:
    from activity.activity import load_activity
    from activity.confusion import ConfusionPicture
    from activity.voting import VotedClassification, class_weights
    from pictures.curves import CurvePicture

    with tk.start_run("har", config) as run:
        data = load_activity(
            config.dataset,
            config.data_dir,
            window_seconds=config.window_seconds,
            overlap=config.overlap,
            fold=config.fold,
            folds=config.folds,
            rate_hz=config.rate_hz,
            validation=config.validates,
            on_main=run.on_main_and_share,
        )
        model = build_model(config, data)
        optimizer = build_optimizer(config, model)
        run.describe(**data.facts(), mode=config.mode, class_balance=config.class_balance, frozen=config.freeze_encoder)
        run.print(f"{data.describe()}; loss balanced by class: {config.class_balance}")
        task = VotedClassification(class_weights=class_weights(data.class_counts, config.class_balance))
        scores = {"eval/accuracy": "accuracy", "eval/macro_f1": "macro-F1"}
        pictures = [CurvePicture("scores", "Test windows", scores, percent=True), ConfusionPicture()]
        return tk.fit(run, task, model, optimizer, data, callbacks=pictures)


PRESETS = {"full": full, "debug": debug, "flatten": flatten, "average": average, "first": first}

if __name__ == "__main__":
    tk.run_recipe(main, PRESETS, __doc__)

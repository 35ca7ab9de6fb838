"""A small convolutional network that learns digits from 100 labels and 60,000 images without one.

python recipes/few_labels.py                 FixMatch and virtual adversarial training together
python recipes/few_labels.py vat             a control: virtual adversarial training alone
python recipes/few_labels.py supervised      a control: the labelled images alone

What they reach: docs/recipes/vae.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

import toolkit as tk

if TYPE_CHECKING:
    import torch
    from torch import nn

    from digits.classifier import ConvolutionalClassifier


class Config(tk.RunConfig):
    dataset: str = "auto"
    """auto, mnist, fashion_mnist, digits, a folder of images, or owner/name of the Hub; :validation behind any."""
    method: Literal["fixmatch_vat", "fixmatch", "vat", "supervised"] = "fixmatch_vat"
    """Use of images without a label: confident pseudo-labels (fixmatch), virtual adversarial training (vat),
    both, or nothing."""
    labels: int = 100
    """Training images that keep their label, evenly over classes, drawn by --seed; the others have none."""
    width: PositiveInt = 32
    """Channels of the first two convolutions; the others have twice as many."""
    labelled_augment: NonNegativeFloat = 0.7
    """Random affine changes of labelled images; 1 is 15 degrees, 15 % in scale, 0.15 in shear and 3 pixels."""
    weight_average: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay per step of the running mean of the weights, which answers in evaluation and gives pseudo-labels."""
    pseudo_label_weight: NonNegativeFloat = 1.0
    """fixmatch: weight of pseudo-labels, beside the cross-entropy of labelled images."""
    confidence: Annotated[float, Field(gt=0, le=1)] = 0.98
    """fixmatch: probability from which an answer is a pseudo-label."""
    weak_augment: NonNegativeFloat = 0.2
    """Affine changes of images without a label, in the units of --labelled-augment."""
    strong_augment: NonNegativeFloat = 1.3
    """fixmatch: affine changes of the view that learns the pseudo-label."""
    blank: NonNegativeInt = 8
    """fixmatch: side of the black square in that view, in pixels."""
    smoothness_weight: NonNegativeFloat = 1.0
    """vat: weight of the local divergence."""
    smoothness_radius: PositiveFloat = 2.0
    """vat: 2-norm of the perturbations, of pixels between 0 and 1."""
    entropy_weight: NonNegativeFloat = 1.0
    """vat: weight of the entropy of the answers."""


def fixmatch_vat() -> Config:
    """FixMatch and virtual adversarial training together, 100 labels of MNIST."""
    schedule = tk.ScheduleOptions(kind="stable_decay")
    return Config(epochs=3, batch_size=64, lr=2e-3, schedule=schedule, smoothness_radius=1.5)


def debug() -> Config:
    """Seconds: the embedded digits, a small network."""
    return fixmatch_vat().replace(dataset="digits", epochs=5, labels=50, width=4, log_every=10)


def vat() -> Config:
    """The control: virtual adversarial training alone, the same network and steps."""
    return fixmatch_vat().replace(method="vat", smoothness_radius=2.0)


def supervised() -> Config:
    """The control: labelled images alone, the same network, augmentation and steps."""
    return fixmatch_vat().replace(method="supervised", lr=1e-3, labelled_augment=1.0)


def build(config: Config, data: tk.data.ImageData) -> tuple[ConvolutionalClassifier, tk.Task]:
    """The model and its task."""
    from digits.classifier import ConvolutionalClassifier
    from digits.consistency import ConsistencyRegularization

    radius = config.smoothness_radius
    model = ConvolutionalClassifier(
        shape=data.shape, num_classes=data.num_classes, width=config.width, smoothness_radius=radius
    )
    terms: dict[str, float] = {}
    if "fixmatch" in config.method:
        terms |= {"pseudo_label_weight": config.pseudo_label_weight, "confidence": config.confidence}
    if "vat" in config.method:
        terms |= {"smoothness_weight": config.smoothness_weight, "entropy_weight": config.entropy_weight}
    return model, ConsistencyRegularization(**terms)


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Return `--optimizer.kind`, or any other optimizer of the model's parameters."""
    return tk.build_optimizer(model, config)


def main(config: Config) -> dict[str, Any]:
    from autoencoder.labels import FewLabels
    from digits.affine import AffineRange
    from digits.classifier import WeightAverage
    from digits.views import Views

    with tk.start_run("few_labels", config) as run:
        share = run.on_main_and_share
        data = tk.load_images(config.dataset, config.data_dir, validation=config.validates, on_main=share)
        run.describe(dataset=data.name, dataset_notice=data.notice)
        model, task = build(config, data)
        optimizer = build_optimizer(config, model)
        vat = "vat" in config.method
        few = FewLabels(data.train, config.labels, num_classes=data.num_classes, seed=config.seed, directions=vat)
        views = Views(
            few,
            labelled=AffineRange().times(config.labelled_augment),
            weak=AffineRange().times(config.weak_augment),
            strong=AffineRange().times(config.strong_augment) if "fixmatch" in config.method else None,
            blank=config.blank,
            seed=config.seed,
        )
        average = WeightAverage(config.weight_average)
        few_labels = tk.Splits(few.table, data.test, data.validation)
        return tk.fit(run, task, model, optimizer, few_labels, callbacks=[average], augment=views)


PRESETS = {"fixmatch_vat": fixmatch_vat, "debug": debug, "vat": vat, "supervised": supervised}

if __name__ == "__main__":
    tk.run_recipe(main, PRESETS, __doc__)

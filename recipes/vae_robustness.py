"""A variational autoencoder that learns digits from few labels, some of them wrong.

python recipes/vae_robustness.py --labels 100                        ten labels of each class, 60,000 images
python recipes/vae_robustness.py --labels 3000 --corruption-rate 0.2 --corruption resampled
python recipes/vae_robustness.py supervised --labels 100             the control: a classifier on the labels alone

A grid of them, with tables and plots: docs/operate/launchers.md. What it reaches: docs/recipes/vae.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

import toolkit as tk

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autoencoder.relaxed_vae import RelaxedVAE
    from autoencoder.vae import SemiSupervisedVAE


class Config(tk.RunConfig):
    dataset: str = "auto"
    """auto, mnist, fashion_mnist, digits, a folder of images, or owner/name of the Hub; :validation behind any."""
    objective: Literal["exact", "supervised", "pseudo_label", "reference"] = "exact"
    """M2 with all classes enumerated; the controls: the classifier on labelled images alone, or on those and its own
    confident answers; reference: relaxed classes, and labels by the batch, which shows most labels in time."""
    labels: int = 100
    """Training images that keep their label, evenly over classes, fixed by --seed; the others have none."""
    corruption_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of these that are wrong."""
    corruption: Literal["fixed", "resampled"] = "fixed"
    """fixed: an image has one wrong label for good. resampled: another one at each visit, which averages out."""
    supervision_weight: NonNegativeFloat = 100.0
    """Weight of the cross-entropy of labelled images, beside one bound in nats per image."""
    smoothness_weight: NonNegativeFloat = 100.0
    """Weight of virtual adversarial smoothness of the classifier; 0 turns it off."""
    smoothness_radius: PositiveFloat = 1.0
    """2-norm of its perturbations, of pixels between 0 and 1."""
    style_dim: PositiveInt = 10
    """Dimensions of the style, which is what an image has beside its class."""
    hidden_size: PositiveInt = 256
    """Hidden units of the layers between pixels and style."""
    classifier_hidden_size: PositiveInt = 512
    """Hidden units of the classifier's first layer; the second has half of them."""


def full() -> Config:
    """Five epochs of MNIST, 100 labels."""
    schedule = tk.ScheduleOptions(kind="stable_decay")
    return Config(epochs=5, batch_size=128, schedule=schedule, optimizer=tk.OptimizerOptions(max_grad_norm=None))


def debug() -> Config:
    """Seconds: the embedded digits, small networks."""
    small = full().replace(style_dim=4, hidden_size=32)
    return small.replace(dataset="digits", epochs=2, labels=50, batch_size=64, log_every=10)


def supervised() -> Config:
    """The control: the same classifier on the labelled images alone."""
    return full().replace(objective="supervised")


def reference() -> Config:
    """The reference's model, objective, mask and schedule: not few labels in our sense."""
    plain = tk.OptimizerOptions(max_grad_norm=None, weight_decay=0.0)
    known = full().replace(objective="reference", corruption="resampled", supervision_weight=50.0, seed=42)
    return known.replace(epochs=40, batch_size=256, schedule=tk.ScheduleOptions(kind="constant"), optimizer=plain)


def build(config: Config, data: tk.data.ImageData) -> tuple[SemiSupervisedVAE | RelaxedVAE, tk.Task]:
    """The model and its task."""
    from autoencoder.relaxed_vae import RelaxedBound, RelaxedVAE
    from autoencoder.semi_supervised import LabelledOnly, SemiSupervised
    from autoencoder.vae import SemiSupervisedVAE

    sizes = {"num_pixels": data.num_pixels, "num_classes": data.num_classes, "hidden": config.hidden_size}
    if config.objective == "reference":
        return RelaxedVAE(style_dim=config.style_dim, **sizes), RelaxedBound(config.supervision_weight)
    sizes["classifier_hidden"] = config.classifier_hidden_size
    if config.objective == "exact":
        model = SemiSupervisedVAE(style_dim=config.style_dim, smoothness_radius=config.smoothness_radius, **sizes)
        return model, SemiSupervised(config.supervision_weight, smoothness_weight=config.smoothness_weight)
    weight = float(config.objective == "pseudo_label")
    return SemiSupervisedVAE(style_dim=None, **sizes), LabelledOnly(pseudo_label_weight=weight)


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Return `--optimizer.kind`, or any other optimizer of the model's parameters."""
    return tk.build_optimizer(model, config)


def main(config: Config) -> dict[str, Any]:
    from autoencoder.batch_mask import reference_mask
    from autoencoder.labels import FewLabels, with_noise
    from autoencoder.leakage import StyleLeakage
    from autoencoder.pictures import AutoencoderPictures
    from pictures.curves import CurvePicture

    with tk.start_run("vae_robustness", config) as run:
        share = run.on_main_and_share
        data = tk.load_images(config.dataset, config.data_dir, validation=config.validates, on_main=share)
        run.describe(dataset=data.name, dataset_notice=data.notice)
        model, task = build(config, data)
        optimizer = build_optimizer(config, model)
        few = FewLabels(
            data.train,
            None if config.objective == "reference" else config.labels,
            num_classes=data.num_classes,
            seed=config.seed,
            rate=config.corruption_rate,
            corruption=config.corruption,
            noise_shape=model.noise_shape,
            directions=config.objective == "exact",
        )
        test = with_noise(data.test, model.noise_shape, seed=config.seed)
        callbacks: list[tk.Callback] = []
        if model.noise_shape:
            leakage = {"style_information": "best style, information", "one_style_probe": "best style, accuracy"}
            leakage |= {"all_styles_probe": "all styles, accuracy", "mig": "mig, the higher the better"}
            labels = {f"leakage/{name}": label for name, label in leakage.items()}
            curves = CurvePicture("leakage", "Class read from the style, 0 is none", labels)
            callbacks = [StyleLeakage(test), curves, AutoencoderPictures(test)]
        order = None
        if config.objective == "reference":
            order, mask = reference_mask(len(data.train), config.labels, config.batch_size, seed=config.seed)
            callbacks.append(mask)
        validation = data.validation and with_noise(data.validation, model.noise_shape, seed=config.seed)
        few_labels = tk.Splits(few.table, test, validation)
        return tk.fit(run, task, model, optimizer, few_labels, augment=few, order=order, callbacks=callbacks)


PRESETS = {"full": full, "debug": debug, "supervised": supervised, "reference": reference}

if __name__ == "__main__":
    tk.run_recipe(main, PRESETS, __doc__)

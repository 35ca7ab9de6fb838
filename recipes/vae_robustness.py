"""A variational autoencoder that learns digits from few labels, some of them wrong.

python recipes/vae_robustness.py --labels 100                        ten labels of each class, 60,000 images
python recipes/vae_robustness.py --labels 3000 --corruption-rate 0.2 --corruption resampled
python recipes/vae_robustness.py supervised --labels 100             the control: a classifier on the labels alone

A grid of them, with tables and plots: docs/sweeps.md. What it reaches: docs/vae.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import toolkit as tk


@dataclass(frozen=True, kw_only=True)
class Config(tk.RunConfig):
    """Everything that decides a run; the fields that are shared with other recipes are inherited."""

    objective: Literal["exact", "supervised", "pseudo_label"] = "exact"
    """M2 with all classes enumerated; or the controls: the classifier on labelled images alone, or on those and on its
    own confident answers."""
    labels: int = 100
    """Training images that keep their label, evenly over classes, fixed by --seed; the others have none."""
    corruption_rate: float = 0.0
    """Fraction of these that are wrong."""
    corruption: Literal["fixed", "resampled"] = "fixed"
    """fixed: an image has one wrong label for good. resampled: another one at each visit, which averages out."""
    supervision_weight: float = 100.0
    """Weight of the cross-entropy of labelled images, beside one bound in nats per image."""
    smoothness_weight: float = 100.0
    """Weight of virtual adversarial smoothness of the classifier; 0 turns it off."""
    smoothness_radius: float = 1.0
    """2-norm of its perturbations, of pixels between 0 and 1."""
    pseudo_label_weight: float = 1.0
    """Weight of the classifier's own answers, with --objective pseudo_label."""
    style_dim: int = 10
    """Dimensions of the style, which is what an image has beside its class."""
    hidden_size: int = 256
    """Hidden units of the layers between pixels and style."""
    classifier_hidden_size: int = 512
    """Hidden units of the classifier's first layer; the second has half of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tk.require(0 <= self.corruption_rate <= 1, "corruption_rate", self.corruption_rate, "take a fraction, 0 to 1")
        for name in ("supervision_weight", "smoothness_weight", "pseudo_label_weight"):
            tk.require(getattr(self, name) >= 0, name, getattr(self, name), "take zero or more")
        tk.require(self.smoothness_radius > 0, "smoothness_radius", self.smoothness_radius, "take a positive number")
        for name in ("style_dim", "hidden_size", "classifier_hidden_size"):
            tk.require(getattr(self, name) >= 1, name, getattr(self, name), "take one or more")


def full() -> Config:
    """Five epochs of MNIST, 100 labels."""
    return Config(
        epochs=5,
        batch_size=128,
        schedule=tk.ScheduleConfig(name="stable_decay"),
        optimizer=tk.OptimizerConfig(max_grad_norm=None),
    )


def debug() -> Config:
    """Seconds: the embedded digits, small networks."""
    small = replace(full(), style_dim=4, hidden_size=32, classifier_hidden_size=64)
    return replace(small, dataset="digits", epochs=2, labels=50, batch_size=64, log_every=10)


def supervised() -> Config:
    """The control: the same classifier on the labelled images alone."""
    return replace(full(), objective="supervised")


def main(config: Config) -> dict[str, Any]:
    with tk.start_run("vae_robustness", config) as run:
        data = tk.load_images(config.dataset, config.data_dir, agree=run.agree)
        run.describe(dataset=data.name, dataset_notice=data.notice)
        generative = config.objective == "exact"
        noise_shape = (config.style_dim,) if generative else ()
        rows = tk.balanced_rows(data.train.columns["label"], config.labels, data.num_classes, seed=config.seed)
        few = tk.FewLabels(
            data.train,
            rows,
            num_classes=data.num_classes,
            seed=config.seed,
            rate=config.corruption_rate,
            corruption=config.corruption,
            noise_shape=noise_shape,
            directions=generative and config.smoothness_weight > 0,
        )
        model = tk.SemiSupervisedVAE(
            num_classes=data.num_classes,
            style_dim=config.style_dim if generative else None,
            hidden=config.hidden_size,
            classifier_hidden=config.classifier_hidden_size,
            smoothness_radius=config.smoothness_radius,
        )
        own_answers = config.pseudo_label_weight if config.objective == "pseudo_label" else 0.0
        task: tk.Task = tk.LabelledOnly(pseudo_label_weight=own_answers)
        if generative:
            task = tk.SemiSupervised(
                supervision_weight=config.supervision_weight, smoothness_weight=config.smoothness_weight
            )
        test = tk.with_noise(data.test, noise_shape, seed=config.seed) if generative else data.test
        leakage = [tk.StyleLeakage(data.test)] if generative else []
        trainer = tk.standard_trainer(run, task, model, train=few.table, test=test, augment=few, callbacks=leakage)
        return run.finish(trainer.fit())


PRESETS = {"full": full, "debug": debug, "supervised": supervised}

if __name__ == "__main__":
    tk.run_recipe(main, PRESETS, __doc__)

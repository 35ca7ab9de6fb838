"""Semi-supervised autoencoders of images."""

from autoencoder.batch_mask import reference_mask
from autoencoder.labels import FewLabels, balanced_rows, with_noise
from autoencoder.relaxed_bound import RelaxedBound
from autoencoder.relaxed_vae import RelaxedVAE
from autoencoder.semi_supervised import LabelledOnly, SemiSupervised
from autoencoder.style_leakage import StyleLeakage
from autoencoder.vae import SemiSupervisedVAE

__all__ = [
    "FewLabels",
    "LabelledOnly",
    "RelaxedBound",
    "RelaxedVAE",
    "SemiSupervised",
    "SemiSupervisedVAE",
    "StyleLeakage",
    "balanced_rows",
    "reference_mask",
    "with_noise",
]

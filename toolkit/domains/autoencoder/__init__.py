"""Semi-supervised autoencoders of images."""

from toolkit.domains.autoencoder.batch_mask import reference_mask
from toolkit.domains.autoencoder.labels import FewLabels, balanced_rows, with_noise
from toolkit.domains.autoencoder.relaxed_bound import RelaxedBound
from toolkit.domains.autoencoder.relaxed_vae import RelaxedVAE
from toolkit.domains.autoencoder.semi_supervised import LabelledOnly, SemiSupervised
from toolkit.domains.autoencoder.style_leakage import StyleLeakage
from toolkit.domains.autoencoder.vae import SemiSupervisedVAE

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

"""A set of images in the shape of MNIST, for what only asks for its shape."""

from __future__ import annotations

import torch

import toolkit as tk
from toolkit.data.images import ImageData

TABLE = tk.TensorTable(input=torch.zeros(1, 28, 28, dtype=torch.uint8), label=torch.zeros(1, dtype=torch.int64))
DIGITS = ImageData("digits", TABLE, TABLE, mean=0.5, std=0.5)

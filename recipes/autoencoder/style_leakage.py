"""At the end of a run: what the styles of held-out images tell about their classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autoencoder.leakage import measure_leakage
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.data.table import TensorTable
    from toolkit.train.trainer import Trainer

BATCH = 1000


class StyleLeakage(Callback):
    """Adds the measures of `leakage.py` on `table` to the results, for a model that returns "style" and "logits"."""

    def __init__(self, table: TensorTable):
        self.table = table

    @torch.no_grad()
    def on_fit_end(self, trainer: Trainer) -> None:
        trainer.model.eval()
        styles, answers = [], []
        for rows in torch.arange(len(self.table)).split(BATCH):
            # All ranks see all images: a forward pass may be a collective.
            images, noise = (self.table[rows][name].to(trainer.run.device) for name in ("input", "noise"))
            out = trainer.model(images, noise, styles=True)
            styles.append(out["style"].float().cpu())
            answers.append(out["logits"].argmax(-1).cpu())
        trainer.model.train()
        labels = self.table.columns["label"].numpy()
        trainer.results |= trainer.run.on_main_and_share(
            lambda: measure_leakage(torch.cat(styles).numpy(), torch.cat(answers).numpy(), labels)
        )

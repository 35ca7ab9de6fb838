"""Transcripts beside their references, as a file of the run."""

from __future__ import annotations

from contextlib import suppress

import toolkit as tk
from speech.ctc import CTC


class Transcripts(tk.Callback):
    """Writes transcripts.txt at each evaluation of the test data: some utterances of the first process by `task`."""

    def __init__(self, task: CTC):
        self.task = task

    def on_evaluate_end(self, trainer: tk.Trainer, name: str, metrics: dict[str, float]) -> None:
        pairs, self.task.transcripts = self.task.transcripts, []
        if name != "eval" or not trainer.run.is_main:
            return
        epoch = trainer.state.step / trainer.batches.steps_per_epoch
        rates = f"WER {metrics['eval/wer']:.2%}, CER {metrics['eval/cer']:.2%}"
        lines = [f"epoch {epoch:g}: {rates} of all utterances; {len(pairs)} of them:"]
        lines += [f"\nreference   {said}\ntranscript  {heard}" for said, heard in pairs]
        with suppress(OSError):  # a full disk is no reason to stop training
            (trainer.run.folder / "transcripts.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

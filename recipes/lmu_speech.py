"""Speech to characters, or to digits, with Legendre memories, for utterances of any length, also from a stream.

python recipes/lmu_speech.py                      single spoken digits (synthetic tones, where no speech is found)
python recipes/speech/transcribe.py runs/lmu_speech/... some.wav     transcribes a file with a trained model
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

import toolkit as tk

if TYPE_CHECKING:
    import torch
    from torch import nn

    from speech.characters import Characters
    from speech.speech import SpeechData


class Config(tk.RunConfig):
    target: Literal["characters", "digits"] = "characters"
    """characters: CTC; digits: one class for each recording."""
    encoder: Literal["memory", "attention"] = "memory"
    """memory: parallel memories, causal; attention: the encoder of the reference guide."""
    width: PositiveInt = 128
    """Width of the residual stream; `attention` has a head for each 64."""
    channels: PositiveInt = 16
    """Signals that each block of `memory` keeps; `attention` has one."""
    order: PositiveInt = 8
    """Coefficients that are kept of each signal."""
    thetas: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (6.0, 12.0, 24.0)
    """Window of each layer's memory, in steps."""
    stride: PositiveInt = 3
    """Frames per step of `memory`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout rate; drawn on each process by itself."""
    sample_rate: PositiveInt = 8000
    """Hz; other recordings are resampled."""
    num_mels: PositiveInt = 40
    """Bands of the spectrogram."""
    tail_s: Annotated[float, Field(ge=0, le=10)] = 0.25
    """Seconds of silence after each utterance, in which a causal model may still output characters."""
    spec_augment: bool = True
    """Hide bands and stretches of training spectrograms, change loudness and pitch."""
    beam_size: PositiveInt | None = None
    """Prefixes that an evaluation keeps; None takes the best path."""
    lexicon: bool = False
    """Evaluate with the words of the training transcripts alone; needs a beam."""
    held_out_speaker: str | None = None
    """Train on the other speakers, and test on this one."""

    def check_together(self) -> None:
        super().check_together()
        tk.require(not self.lexicon or self.beam_size is not None, "lexicon", self.lexicon, "give beam_size, too")
        tk.require(self.encoder == "memory" or self.width % 64 == 0, "width", self.width, "take a multiple of 64")


def fsdd() -> Config:
    """Single spoken digits, written in letters."""
    return Config(epochs=60, batch_size=32, lr=3e-3, schedule=tk.ScheduleOptions(warmup_steps=200))


def connected() -> Config:
    """Three to seven digits of one speaker, with silence between them."""
    return fsdd().replace(dataset="connected_digits", epochs=8)


def debug() -> Config:
    """Seconds: synthetic tones, a small model."""
    small = fsdd().replace(width=48, channels=8, thetas=(6.0, 12.0), schedule=tk.ScheduleOptions())
    return small.replace(dataset="tones", epochs=6, batch_size=16, lr=5e-3, log_every=10)


def guide() -> Config:
    """The reference guide's encoder and sizes, 7.16 million parameters, on LibriSpeech at 16 kHz; not measured."""
    large = fsdd().replace(encoder="attention", width=512, order=256, thetas=(1000.0,) * 4, dropout=0.1)
    return large.replace(dataset="librispeech", epochs=24, sample_rate=16000, num_mels=80, lr=1e-3)


def build(config: Config, data: SpeechData, letters: Characters) -> tuple[tk.Task, nn.Module]:
    from speech.ctc import CTC
    from speech.decoding import Lexicon
    from speech.speech_models import AttentionEncoder, MemoryEncoder, SpeechClassifier, SpeechRecogniser, Standardise

    sizes: Any = {"thetas": config.thetas, "order": config.order, "dropout": config.dropout}
    kind: Any = MemoryEncoder if config.encoder == "memory" else AttentionEncoder
    if config.encoder == "memory":
        sizes |= {"channels": config.channels, "stride": config.stride}
    encoder = kind(data.num_mels, config.width, **sizes)
    if config.target == "digits":
        task: tk.Task = tk.Classification(inputs=("input", "input_length"))
        return task, SpeechClassifier(Standardise(data.mean, data.std), encoder, data.num_digits())
    lexicon = Lexicon(data.words(letters.space), letters.space) if config.lexicon else None
    task = CTC(letters.decode, blank=letters.blank, beam_size=config.beam_size, lexicon=lexicon)
    return task, SpeechRecogniser(Standardise(data.mean, data.std), encoder, len(letters))


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Return `--optimizer.kind`, or any other optimizer of the model's parameters."""
    return tk.build_optimizer(model, config)


def main(config: Config) -> dict[str, Any]:
    from pictures.curves import CurvePicture
    from speech.audio import LogMel
    from speech.characters import Characters
    from speech.ctc import CTC
    from speech.recogniser import save_recogniser
    from speech.spec_augment import SpecAugment
    from speech.speech import load_speech
    from speech.transcripts import Transcripts

    with tk.start_run("lmu_speech", config) as run:
        letters = Characters()
        mel = LogMel(sample_rate=config.sample_rate, num_mels=config.num_mels)
        data = load_speech(
            config.dataset,
            config.data_dir,
            features=mel,
            characters=letters,
            tail_s=config.tail_s,
            stride=config.stride if config.encoder == "memory" else 1,
            held_out_speaker=config.held_out_speaker,
            validation=config.validates,
            on_main=run.on_main_and_share,
        )
        task, model = build(config, data, letters)
        optimizer = build_optimizer(config, model)
        run.describe(
            dataset=data.name, dataset_notice=data.notice, parameters=sum(p.numel() for p in model.parameters())
        )

        callbacks: list[tk.Callback] = []
        if isinstance(task, CTC):
            rates = {"eval/wer": "words", "eval/cer": "characters"}
            callbacks = [Transcripts(task), CurvePicture("error_rates", "Error rates", rates, percent=True)]

        def save(trainer: tk.Trainer) -> None:
            if run.is_main and not run.accelerator.is_fsdp2:
                save_recogniser(run.folder / "recogniser", trainer.raw_model, mel, letters, config.tail_s)

        return tk.fit(
            run,
            task,
            model,
            optimizer,
            data,
            order=tk.data.BucketedOrder.of(data.train, "input", batch_size=config.batch_size, seed=config.seed),
            augment=SpecAugment(data.mean, seed=config.seed, gain=1.0, shift=1.0) if config.spec_augment else None,
            callbacks=callbacks,
            eval_batch_size=100,
            at_end=save,
        )


PRESETS = {"fsdd": fsdd, "connected": connected, "debug": debug, "guide": guide}

if __name__ == "__main__":
    tk.run_recipe(main, PRESETS, __doc__)

"""Spoken digits: CTC characters, classification, connected digits, and held-out speakers.

    python benchmarks/learning/lmu_speech.py --work DIR --arms fsdd digits connected speakers

Each run is `recipes/lmu_speech.py` in DIR/<arm>-<seed> or DIR/<speaker>-<seed>; the same command resumes. --data-dir or
$TOOLKIT_DATA_DIR has the Free Spoken Digit Dataset. Writes benchmarks/results/lmu_speech.json, and lmu_speakers.json
for the arm `speakers`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from benchmarks.report import sd, write_report
from recipes.lmu_speech import Config, connected, fsdd, main

SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
BEAM = 16
ARMS = ("fsdd", "digits", "connected", "speakers")


def configs(arm: str, seeds: int) -> dict[str, Config]:
    """Return the runs of an arm by folder name."""
    if arm in SPEAKERS:
        base = fsdd().replace(dataset="fsdd", target="digits", epochs=12, held_out_speaker=arm)
        return {f"{arm}-{seed}": base.replace(seed=seed) for seed in range(seeds)}
    base = connected() if arm == "connected" else fsdd().replace(dataset="fsdd")
    if arm == "digits":
        base = base.replace(target="digits", epochs=12)
    return {f"{arm}-{seed}": base.replace(seed=seed) for seed in range(seeds)}


def train(config: Config, folder: Path, data_dir: Path | None) -> dict[str, Any]:
    """Return the results of the run in `folder`, after training if it is unfinished."""
    results = folder / "results.json"
    if not results.exists():
        main(config.replace(run_dir=folder, data_dir=data_dir, tracker="none", log_every=100))
    found: dict[str, Any] = json.loads(results.read_text())
    return found


def with_beam(folder: Path, config: Config, data_dir: Path | None, *, lexicon: bool) -> float:
    """Return the word error rate of the recogniser in `folder` with beam search, in percent."""
    from speech.audio import LogMel
    from speech.characters import Characters
    from speech.ctc import CTC
    from speech.decoding import Lexicon
    from speech.recogniser import load_recogniser
    from speech.speech import load_speech

    recogniser = load_recogniser(folder / "recogniser")
    characters = Characters()
    data = load_speech(
        config.dataset,
        data_dir,
        features=LogMel(sample_rate=config.sample_rate, num_mels=config.num_mels),
        characters=characters,
        tail_s=config.tail_s,
        stride=config.stride,
        on_main=lambda decide: decide(),
    )
    known = Lexicon(data.words(characters.space), characters.space) if lexicon else None
    task = CTC(characters.decode, blank=characters.blank, beam_size=BEAM, lexicon=known)
    errors = words = 0.0
    with torch.inference_mode():
        for rows in torch.arange(len(data.test)).split(100):
            sums = task.evaluate(recogniser.model, data.test[rows]).sums
            errors, words = errors + float(sums["word_errors"]), words + float(sums["words"])
    return 100 * errors / words


def mean_sd(values: Sequence[float]) -> str:
    deviation = f" (sd {statistics.stdev(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


def finished(arm: str, args: argparse.Namespace) -> tuple[dict[str, tuple[Config, Path]], dict[str, dict[str, Any]]]:
    """Return the runs of an arm and their results; without --report, missing runs are trained."""
    runs = {name: (config, args.work / name) for name, config in configs(arm, args.seeds).items()}
    if args.report:
        runs = {name: run for name, run in runs.items() if (run[1] / "results.json").exists()}
    return runs, {name: train(config, folder, args.data_dir) for name, (config, folder) in runs.items()}


def measure(arm: str, args: argparse.Namespace) -> dict[str, object]:
    runs, found = finished(arm, args)
    row: dict[str, object] = {"arm": arm, "runs": len(found), "epochs": next(iter(runs.values()))[0].epochs}
    if arm == "digits":
        accuracies = {name: 100 * run["test_accuracy"] for name, run in found.items()}
        row |= {
            "accuracy %": mean_sd(list(accuracies.values())),
            "WER %": None,
            "CER %": None,
            "WER % with a beam": None,
            "WER % with a lexicon": None,
        }
        row["each"] = {name: round(value, 2) for name, value in accuracies.items()}
    else:
        beams, lexicons = (
            [with_beam(folder, config, args.data_dir, lexicon=lexicon) for config, folder in runs.values()]
            for lexicon in (False, True)
        )
        row |= {"accuracy %": None, "WER %": mean_sd([100 * run["test_wer"] for run in found.values()])}
        row |= {
            "CER %": mean_sd([100 * run["test_cer"] for run in found.values()]),
            "WER % with a beam": mean_sd(beams),
        }
        row["WER % with a lexicon"] = mean_sd(lexicons)
        row["each"] = {name: round(100 * run["test_wer"], 2) for name, run in found.items()}
    row["parameters"] = next(iter(found.values()))["parameters"]
    row["minutes each"] = round(statistics.mean(run["wall_seconds"] for run in found.values()) / 60, 1)
    return row


def each_speaker(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return the accuracy on all recordings of each held-out speaker: mean, standard deviation and each seed."""
    accuracies = {
        speaker: [100 * run["test_accuracy"] for run in finished(speaker, args)[1].values()] for speaker in SPEAKERS
    }
    accuracies["mean of all"] = [statistics.mean(speakers) for speakers in zip(*accuracies.values(), strict=True)]
    return [
        {
            "held out": name,
            "accuracy %": round(statistics.mean(values), 1),
            "sd": sd(values, 1),
            "each seed": [round(value, 1) for value in values],
        }
        for name, values in accuracies.items()
        if values
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs; finished runs are not repeated")
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with fsdd/. Default: $TOOLKIT_DATA_DIR")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3, help="runs per arm and speaker. Default: 3")
    parser.add_argument("--report", action="store_true", help="report finished runs without training")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if arms := [arm for arm in args.arms if arm != "speakers"]:
        write_report("lmu_speech", [measure(arm, args) for arm in arms])
    if "speakers" in args.arms:
        write_report("lmu_speakers", each_speaker(args))

"""Recognises the speech in a WAV file, chunk by chunk as from a microphone.

python recipes/speech/transcribe.py runs/lmu_speech/2026-11-21 word.wav
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # the folder of recipes is on the path of recipes, and not of this script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from speech.audio import decode, resample
from speech.recogniser import load_recogniser
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Transcribes as `argv` (None: the command line) says; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recogniser", type=Path, help="the folder `recogniser` of a run of lmu_speech, or the run")
    parser.add_argument("sound", type=Path, help="a WAV file; FLAC and others with the package soundfile")
    parser.add_argument("--piece-s", type=float, default=0.1, help="seconds of sound in a chunk")
    parser.add_argument(
        "--json", action="store_true", help="a JSON line per chunk with new text: its end in seconds, and the text"
    )
    args = parser.parse_args(argv)
    if not args.piece_s > 0:
        parser.error(f"--piece-s {args.piece_s}: take a positive number of seconds.")
    try:
        _transcribe(args)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    return EXIT_DONE


def _transcribe(args: argparse.Namespace) -> None:
    inside = args.recogniser / "recogniser"
    recogniser = load_recogniser(inside if inside.is_dir() else args.recogniser)
    try:
        samples, rate = decode(args.sound.read_bytes(), args.sound)
    except OSError as error:
        raise UserError(f"{args.sound} cannot be read ({error.strerror}): give a sound file.") from None
    heard_at = recogniser.features.sample_rate
    samples = resample(samples, rate, heard_at)
    listener = recogniser.listen()
    piece = max(1, round(args.piece_s * heard_at))
    for begin in range(0, len(samples), piece):
        _say(args, listener.hear(samples[begin : begin + piece]), min(begin + piece, len(samples)) / heard_at)
    _say(args, listener.finish(), len(samples) / heard_at)
    if not args.json:
        sys.stdout.write("\n")


def _say(args: argparse.Namespace, text: str, end_s: float) -> None:
    if text:
        sys.stdout.write(json.dumps({"end_s": round(end_s, 3), "text": text}) + "\n" if args.json else text)
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

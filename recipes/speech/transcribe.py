"""Recognises the speech in a WAV file, chunk by chunk as from a microphone.

python recipes/speech/transcribe.py runs/lmu_speech/... some.wav
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import toolkit as tk


def main(argv: Sequence[str] | None = None) -> int:
    """Transcribe as the words `argv` say (None: the command line); returns the exit code."""
    about, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="transcribe.py", description=about, epilog=usage, allow_abbrev=False)
    parser.add_argument("recogniser", type=Path, help="the folder `recogniser` of a run of lmu_speech, or the run")
    parser.add_argument("sound", type=Path, help="a WAV file; FLAC and others with the package soundfile")
    parser.add_argument("--piece-s", type=float, default=0.1, help="seconds of sound in a chunk")
    parser.add_argument(
        "--json", action="store_true", help="a JSON line per chunk with new text: its end in seconds, and the text"
    )
    args = parser.parse_args(argv)
    try:
        if not args.piece_s > 0:
            raise tk.UserError(f"--piece-s {args.piece_s}: take a positive number of seconds.")
        transcribe(args.recogniser, args.sound, piece_s=args.piece_s, as_json=args.json)
    except (tk.UserError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def transcribe(folder: Path, sound: Path, *, piece_s: float, as_json: bool) -> None:
    """Print the text of a sound file as it is recognised.

    Args:
        folder: The folder `recogniser` of a run, or the run.
        sound: A sound file.
        piece_s: Seconds of sound that the recogniser hears at a time.
        as_json: Print a JSON line per chunk with new text instead of plain text.

    Raises:
        UserError: There is no recogniser in `folder`, or `sound` cannot be read.
    """
    # Not at the top, because a script mends its path first, see below.
    from speech.audio import decode, resample
    from speech.recogniser import load_recogniser

    inside = folder / "recogniser"
    recogniser = load_recogniser(inside if inside.is_dir() else folder)
    samples, rate = decode(sound.read_bytes(), sound)
    heard_at = recogniser.features.sample_rate
    samples = resample(samples, rate, heard_at)
    listener = recogniser.listen()
    piece = max(1, round(piece_s * heard_at))

    def say(text: str, end: int) -> None:
        if text:
            line = json.dumps({"end_s": round(end / heard_at, 3), "text": text}) + "\n"
            sys.stdout.write(line if as_json else text)
            sys.stdout.flush()

    for begin in range(0, len(samples), piece):
        say(listener.hear(samples[begin : begin + piece]), min(begin + piece, len(samples)))
    say(listener.finish(), len(samples))
    if not as_json:
        sys.stdout.write("\n")


if __name__ == "__main__":
    # A script's own folder is first on its path, and `speech` there is the module speech.py and not the package.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.exit(main())

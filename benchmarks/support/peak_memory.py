"""Peak memory in a profile of torch."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from torch.profiler import profile


def peak_bytes(profiled: profile) -> int:
    """Return the peak of allocated bytes in a profile with `profile_memory=True`."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak

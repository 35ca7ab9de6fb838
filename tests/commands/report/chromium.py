"""Headless Chromium over the pipe of its debugging protocol : a page, its console, and scripts in it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --disable-dev-shm-usage --remote-debugging-pipe"
)

ANSWER_S = 60


class Tab:
    """A page in the browser."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers = commands, answers
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.console: list[str] = []
        """What was written to the console, and errors that nobody caught."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call `method` and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], ANSWER_S)
            assert ready, f"no answer within {ANSWER_S} s"
            read = os.read(self._answers, 1 << 20)
            assert read, "the browser ended"
            self._rest += read
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        found = event.get("params", {})
        if event.get("method") == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(part.get("value")) for part in found["args"]))
        elif event.get("method") == "Runtime.exceptionThrown":
            self.console.append(json.dumps(found["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded":
            self.console.append(found["entry"]["text"])

    def run(self, script: str) -> Any:
        """The value of `script`, an expression or a promise."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, page: Path) -> None:
        """Go to `page`, and wait until its scripts have run."""
        self.send("Page.navigate", url=page.as_uri())
        while not self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
            pass

    def show(self, scheme: str, width: int, height: int) -> None:
        """Be light or dark, and of this size in pixels."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def wait_until_drawn(self) -> float:
        """Wait until Bokeh has drawn the tab that is open; returns the browser's seconds since it went to the page."""
        return self.run(
            "new Promise(done => { const wait = () => window.Bokeh?.documents[0]?.is_idle "
            "? done(performance.now() / 1000) : setTimeout(wait, 20); wait(); })"
        )

    def choose(self, title: str) -> None:
        """Open the tab of the page that is called so."""
        self.run(
            "(async () => { const [tabs] = Bokeh.documents[0].roots(); "
            f"tabs.active = tabs.tabs.findIndex(tab => tab.title === {json.dumps(title)}); "
            "await new Promise(done => setTimeout(done, 2000)); })()"
        )

    def screenshot(self) -> bytes:
        """PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot")["data"])


@contextmanager
def chromium(profile: Path) -> Iterator[Tab]:
    """A tab of a fresh browser, which keeps its files in `profile`."""
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    their_commands, commands = os.pipe()
    answers, their_answers = os.pipe()
    # The protocol's pipes are file descriptors 3 and 4.
    line = f"exec {browser} {FLAGS} --user-data-dir={profile} 3<&{their_commands} 4>&{their_answers}"
    process = subprocess.Popen(
        ["bash", "-c", line],
        pass_fds=(their_commands, their_answers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_commands)
    os.close(their_answers)
    try:
        tab = Tab(commands, answers)
        yield tab
        os.write(commands, b'{"id": 0, "method": "Browser.close"}\0')
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)

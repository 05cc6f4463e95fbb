"""A real Chromium driven over its debugging pipe: opens a file, records requests and errors, takes screenshots."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Browser:
    """One page. events: every protocol event seen so far, in order."""

    def __init__(self, write_to: int, read_from: int) -> None:
        self._out = write_to
        self._in = read_from
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def attach(self) -> None:
        """Opens an empty page and listens to what it does."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """Asks the whole browser to end, which lets it finish writing its profile."""
        self._session = None
        self.send("Browser.close")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls one method of the protocol and waits for its answer, keeping the events that arrive meanwhile."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._in, 1 << 16)
            if not chunk:
                raise RuntimeError("the browser closed its pipe")
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light", script: bool = True
    ) -> None:
        """Loads a file in a window of that size and color scheme, and waits until it has loaded."""
        self.events.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Emulation.setScriptExecutionDisabled", value=not script)
        self.send("Page.navigate", url=path.as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._receive())
        if script:  # what the page builds after its first paint is there then
            self.run("new Promise((r) => requestAnimationFrame(() => setTimeout(() => setTimeout(r))))")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is waited for."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def errors(self) -> list[str]:
        """Uncaught exceptions and errors written to the console since the page was opened."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        found = [e for e in self.events if e.get("method") in kinds]
        return [json.dumps(e["params"]) for e in found if '"type": "log"' not in json.dumps(e["params"])]

    def requests(self) -> list[str]:
        """Addresses that the page asked for since it was opened, its own file and inline data apart."""
        urls = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in urls[1:] if not url.startswith("data:")]

    def screenshot(self, *, whole: bool = False) -> bytes:
        """A PNG of the window, or of the whole page."""
        return base64.b64decode(
            self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))["data"]
        )

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16000), "scale": 1}}


def find_chromium() -> str | None:
    """The browser's path, or None where there is none."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """A headless Chromium with a profile of its own, closed at the end."""
    program = find_chromium()
    if program is None:
        raise RuntimeError("no Chromium found: install it, or set CHROMIUM to its path")
    to_child, write_to = os.pipe()
    read_from, from_child = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The protocol is spoken on descriptors 3 and 4, which the shell sets up before it starts the browser.
        flags = (
            "--headless=new --remote-debugging-pipe --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        )
        command = f'exec 3<&{to_child} 4>&{from_child}; exec "$0" {flags} --user-data-dir="$1"'
        process = subprocess.Popen(
            ["bash", "-c", command, program, profile], pass_fds=(to_child, from_child), stderr=subprocess.DEVNULL
        )
        os.close(to_child)
        os.close(from_child)
        try:
            page = Browser(write_to, read_from)
            page.attach()
            yield page
            page.close()
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(timeout=20)
            os.close(write_to)
            os.close(read_from)

"""Drives headless Chromium as a person would: opens a page, clicks, types, looks.

Chromium is told what to do in JSON over two pipes (its DevTools protocol), which needs no package.
"""

import base64
import itertools
import json
import os
import select
import shlex
import shutil
import subprocess
import time

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One page of a browser; `faults` are the errors that it has logged."""

    def __init__(self, folder):
        chromium = shutil.which("chromium")
        if chromium is None:
            pytest.skip("there is no Chromium: apt-get install chromium")
        read, self._out = os.pipe()
        self._in, write = os.pipe()
        # it reads from 3 and writes to 4
        words = shlex.join([chromium, *FLAGS, f"--user-data-dir={folder}"])
        command = f"exec {words} 3<&{read} 4>&{write}"
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(read, write), stderr=subprocess.DEVNULL
        )
        os.close(read)
        os.close(write)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session = None
        self.faults = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method, **parameters):
        """Run a method of the protocol; what it returns."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != number:
            self._heard(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _message(self):
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], 60)[0], "chromium does not answer"
            part = os.read(self._in, 1 << 16)
            assert part, "chromium has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def _heard(self, event):
        if event.get("method") == "Runtime.exceptionThrown":
            self.faults.append(event["params"]["exceptionDetails"])
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] in (
            "error",
            "warning",
        ):
            self.faults.append(event["params"]["entry"]["text"])

    def open(self, address, width=1200, dark=False):
        """Open a page in a window of a width, in a light or a dark theme."""
        self.look_as(width, dark)
        self("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def look_as(self, width, dark=False):
        """Change the width of the window and the theme."""
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = "dark" if dark else "light"
        self(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def value(self, expression):
        """The value of an expression of JavaScript in the page."""
        found = self(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, (expression, found)
        return found["result"].get("value")

    def until(self, expression, seconds=30):
        """Wait until an expression is true; its value."""
        end = time.monotonic() + seconds
        while not (found := self.value(expression)):
            assert time.monotonic() < end, f"never: {expression}"
            time.sleep(0.05)
        return found

    def picture(self, path):
        """Save a picture of the whole page."""
        size = self("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shown = self("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shown["data"]))

    def close(self):
        """End the browser."""
        self._process.terminate()
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)

"""A real browser for tests: finds chromium, and drives it by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
#: Why tests are skipped without a browser.
NO_BROWSER = "no chromium, and it cannot be installed here"
#: Options that keep it from looking for anything on the network.
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
#: Fields of the keys that do more than what a page listens for: they press a button, or move the focus.
DEFAULT_ACTIONS: dict[str, dict[str, Any]] = {
    "Enter": {"text": "\r", "windowsVirtualKeyCode": 13},
    "Space": {"key": " ", "text": " ", "windowsVirtualKeyCode": 32},
    "Tab": {"windowsVirtualKeyCode": 9},
}
#: How long any answer may take, in seconds.
PATIENCE_S = 300.0


@cache
def find_chromium() -> str | None:
    """A browser; on a bare machine, where root runs the tests, from Debian's packages."""
    if not any(map(shutil.which, PROGRAMS)) and os.geteuid() == 0 and shutil.which("apt-get"):
        apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for arguments in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
            subprocess.run(
                [*apt, *arguments], env=environment, capture_output=True, check=False, timeout=240
            )
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One page in a browser. `complaints` holds what its console shows."""

    def __init__(self, program: str, profile: Path, width: int = 1280, height: int = 1000) -> None:
        # The child's ends must not have the numbers 3 and 4, as which the shell gives them on.
        theirs_in, ours_out = (_above_ten(fd) for fd in os.pipe())
        ours_in, theirs_out = (_above_ten(fd) for fd in os.pipe())
        size = f"--window-size={width},{height}"
        command = [program, *OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={profile}", size]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "browser", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = ours_out, ours_in
        self._buffer, self._sent, self._session = b"", 0, None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.sized(width, height)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result; AssertionError where the browser refuses it or is silent for PATIENCE_S."""
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._sent:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], PATIENCE_S)
            assert ready, f"no answer within {PATIENCE_S:g} s"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        given = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(given["exceptionDetails"])[:500])
        if message.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(given["args"])[:500])
        if message.get("method") == "Log.entryAdded":
            self.complaints.append(given["entry"]["text"])
        return message

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, address: str, until: str = "true") -> None:
        """Load a page from scratch, until an expression holds in it."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        ready = (
            f"document.readyState === 'complete' && location.href !== 'about:blank' && ({until})"
        )
        self.wait_for(ready)

    def wait_for(self, expression: str) -> None:
        """Until an expression holds."""
        end = time.monotonic() + PATIENCE_S
        while not self.run(expression):
            assert time.monotonic() < end, f"never: {expression}"
            time.sleep(0.02)

    def mouse(self, kind: str, x: float, y: float, **given: Any) -> None:
        """A real event of the mouse: `mouseMoved`, `mousePressed`, `mouseReleased`."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **given)

    def press(self, key: str) -> None:
        """A real key, by its name: `ArrowRight`, `Enter`, `Tab`."""
        for kind in ("keyDown", "keyUp"):
            event = {"type": kind, "key": key, "code": key, **DEFAULT_ACTIONS.get(key, {})}
            self.call("Input.dispatchKeyEvent", **event)

    def sized(self, width: int, height: int) -> None:
        """Let pages have a screen of this many pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def shown_as(self, scheme: str) -> None:
        """Let pages be `light` or `dark`."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path) -> None:
        """What is in sight, as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._out)
        os.close(self._in)


def _above_ten(fd: int) -> int:
    """The same pipe under a number from 10 on."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved

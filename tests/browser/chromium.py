"""A headless Chromium for the tests of pages, spoken to in the DevTools protocol over a pair of pipes.

Nothing is installed for it but the browser: the protocol is JSON with a zero byte after each message.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")  # also in tools/setup_env.sh
PATIENCE = 60.0  # seconds for one answer, on a busy machine
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--remote-debugging-pipe", "--hide-scrollbars", "--force-color-profile=srgb"),
)


class Navigated(AssertionError):
    """The page left while an expression was evaluated in it."""


def executable() -> str:
    """The browser that GSPO_HPC_CHROMIUM names, or that is on PATH."""
    named = os.environ.get("GSPO_HPC_CHROMIUM")
    found = named or next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found, (
        f"no browser: none of {', '.join(NAMES)} is on PATH. bash tools/setup_env.sh --dev installs Debian's; "
        "on Ubuntu, which has only a snap, name another in GSPO_HPC_CHROMIUM"
    )
    return found


class Browser:
    """One browser process with a profile of its own, which is gone afterwards."""

    def __init__(self, folder: Path) -> None:
        there, self._write = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in os.pipe())
        self._read, here = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 20) for fd in os.pipe())
        line = f'exec "$@" 3<&{there} 4>&{here}'  # Chromium expects its pipes there
        words = [executable(), *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._log = (folder / "chromium.log").open("wb")
        self._process = subprocess.Popen(
            ["bash", "-c", line, "chromium", *words], pass_fds=(there, here), stdout=self._log, stderr=self._log
        )
        os.close(there)
        os.close(here)
        self._rest = b""
        self._count = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of a command."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        text = json.dumps(message | ({"sessionId": session} if session else {}))
        os.write(self._write, text.encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._count:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise Navigated(answer["error"])
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def wait_for(self, method: str, session: str) -> dict[str, Any]:
        """The next event of a name, whether it has come already or not."""
        deadline = time.monotonic() + PATIENCE
        while True:
            for place, event in enumerate(self.events):
                if event.get("method") == method and event.get("sessionId") == session:
                    return self.events.pop(place)
            self.events.append(self._next(deadline))

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._log.close()

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed


@dataclass
class Tab:
    """One page in the browser, as wide as a test says."""

    browser: Browser
    session: str
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command for this page."""
        return self.browser.call(method, self.session, **parameters)

    def show(
        self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False, media: str = "screen"
    ) -> Tab:
        """Open a file as a reader would whose screen is so wide."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.browser.events = [one for one in self.browser.events if one.get("method") != "Page.loadEventFired"]
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.browser.wait_for("Page.loadEventFired", self.session)
        return self

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        given = {"expression": script, "returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", **given)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Return once an expression is true; a page that leaves while it is asked is asked again."""
        deadline = time.monotonic() + PATIENCE
        while not self._holds(script):
            assert time.monotonic() < deadline, script
            time.sleep(0.02)

    def _holds(self, script: str) -> bool:
        with contextlib.suppress(Navigated):
            return bool(self.run(script))
        return False

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key and let it go."""
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
        self.call("Input.dispatchKeyEvent", type="keyDown", **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def click(self, selector: str) -> None:
        """Click in the middle of the first element that matches."""
        place = self.run(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            " one.scrollIntoView({block: 'center'}); const box = one.getClientRects()[0];"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        given = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **given)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **given)

    def scripts(self, allowed: bool) -> None:
        """Let pages run scripts, or not."""
        self.call("Emulation.setScriptExecutionDisabled", value=not allowed)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write what is seen as a PNG; `whole`: as long as the page is, else as high as the window."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self) -> bytes:
        """The page as it is printed on A4."""
        found = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, preferCSSPageSize=True)
        return base64.b64decode(found["data"])

    def settle(self) -> None:
        """Sort the events that have come by: what was requested, and what went wrong."""
        self.run("0")  # whatever came before its answer has arrived
        for event in self.browser.events:
            name, given = event.get("method"), event.get("params", {})
            if event.get("sessionId") != self.session:
                continue
            if name == "Network.requestWillBeSent":
                self.requests.append(given["request"]["url"])
            elif name == "Runtime.exceptionThrown":
                self.problems.append(str(given["exceptionDetails"]))
            elif name == "Log.entryAdded":
                self.problems.append(given["entry"]["text"])
            elif name == "Runtime.consoleAPICalled":
                self.problems.append(str(given["args"]))
        self.browser.events = [one for one in self.browser.events if one.get("sessionId") != self.session]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser within the block."""
    with tempfile.TemporaryDirectory(prefix="gspo-hpc-chromium-", ignore_cleanup_errors=True) as folder:
        started = Browser(Path(folder))
        try:
            yield started
        finally:
            started.close()


@contextlib.contextmanager
def tab(started: Browser) -> Iterator[Tab]:
    """A new page of the browser within the block."""
    target = started.call("Target.createTarget", url="about:blank")["targetId"]
    session = started.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    opened = Tab(started, session)
    for domain in ("Page", "Runtime", "Network", "Log"):
        opened.call(f"{domain}.enable")
    try:
        yield opened
    finally:
        started.call("Target.closeTarget", targetId=target)

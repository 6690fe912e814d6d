"""Chromium without a window, driven by the DevTools protocol over a pipe.

with Chromium(tmp_path) as browser, browser.page(url, width=1280) as page:
    page.until("document.title")
    assert page.evaluate("1 + 1") == 2
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services import FOLDER, debian_environment, program

CALL_SECONDS = 60.0
_LIBRARIES = FOLDER / "debian" / "usr" / "lib"
_PROGRAM = _LIBRARIES / "chromium" / "chromium"
_LOWEST_FD = 16  # of our ends of the pipes: 3 and 4 are the browser's
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--disable-extensions", "--disable-default-apps", "--mute-audio", "--force-color-profile=srgb", "--lang=en-GB"),
    *("--enable-precise-memory-info", "--js-flags=--expose-gc", "--remote-debugging-pipe"),
)


class BrowserError(AssertionError):
    """What the browser answered a command with, or that it has ended."""


class Chromium:
    """A process with a profile of its own in `folder`."""

    def __init__(self, folder: Path) -> None:
        program(_PROGRAM, "Chromium")
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._last = 0
        self._lock = threading.Lock()
        self._log = (folder / "chromium.log").open("wb")
        to_browser, self._commands = _pipe()
        self._events, from_browser = _pipe()
        libraries = debian_environment()["LD_LIBRARY_PATH"]
        self._process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", str(_PROGRAM), *_OPTIONS),
                *(f"--user-data-dir={folder / 'profile'}", "about:blank"),
            ],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env={
                **os.environ,
                "HOME": str(folder),
                "LD_LIBRARY_PATH": f"{libraries}:{_LIBRARIES / 'x86_64-linux-gnu' / 'pulseaudio'}",
                "XDG_DATA_HOME": str(FOLDER / "debian" / "usr" / "share"),  # fonts
            },
        )
        os.close(to_browser)
        os.close(from_browser)
        self._reader = threading.Thread(target=self._read, name="chromium-events", daemon=True)
        self._reader.start()

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._reader.join(30)
        os.close(self._commands)
        os.close(self._events)
        self._log.close()

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """The result of a command; BrowserError when it fails."""
        answer: queue.Queue[dict[str, Any]] = queue.Queue()
        with self._lock:
            self._last += 1
            number = self._last
            self._answers[number] = answer
            message = {"id": number, "method": method, "params": parameters}
            if session:
                message["sessionId"] = session
            os.write(self._commands, json.dumps(message).encode() + b"\0")
        try:
            given = answer.get(timeout=CALL_SECONDS)
        except queue.Empty:
            raise BrowserError(f"{method} was not answered within {CALL_SECONDS:g} s") from None
        if "error" in given:
            raise BrowserError(f"{method}: {given['error']}")
        result: dict[str, Any] = given["result"]
        return result

    @contextmanager
    def page(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        phone: bool = False,
        script: str = "",
        headers: dict[str, str] | None = None,
    ) -> Iterator[Page]:
        """A tab. `script` runs before those of the page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, target, session)
        try:
            for domain in ("Page", "Runtime", "Network", "Log"):
                page.call(f"{domain}.enable")
            page.resize(width, height, phone=phone)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            page.call("Emulation.setEmulatedMedia", features=[scheme])
            page.call("Emulation.setTimezoneOverride", timezoneId="UTC")
            if headers:
                page.call("Network.setExtraHTTPHeaders", headers=headers)
            if script:
                page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
            page.call("Page.navigate", url=url)
            page.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")
            yield page
        finally:
            with contextlib.suppress(BrowserError):
                self.call("Target.closeTarget", targetId=target)
            del self._pages[session]

    def _read(self) -> None:
        unread = b""
        while piece := os.read(self._events, 1 << 16):
            *messages, unread = (unread + piece).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                    page.note(message["method"], message["params"])
        for answer in self._answers.values():
            answer.put({"error": "the browser has ended"})


class Page:
    """`requests`: URLs that it asked for. `problems`: exceptions and errors of its console."""

    def __init__(self, browser: Chromium, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session
        self.requests: list[str] = []
        self.problems: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.problems.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "assert"):
            self.problems.append(str(event["args"]))

    def evaluate(self, expression: str) -> Any:
        """Its value, of a promise what it comes to. As from a click of the user."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 30.0) -> Any:
        """Polls until it is true, and returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"not so within {seconds:g} s: {expression} {self.problems}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        """What a person reads there."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str, label: str = "") -> None:
        """The first such element, as soon as there is one, with that text where there are several."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        found += f".find((each) => ['', each.textContent.trim()].includes({json.dumps(label)}))"
        self.until(f"(() => {{ const found = {found}; found?.click(); return Boolean(found); }})()")

    def fill(self, selector: str, value: str) -> None:
        self.evaluate(
            f"(([selector, value]) => {{ const input = document.querySelector(selector); input.value = value; "
            f"input.dispatchEvent(new Event('input', {{ bubbles: true }})); }})({json.dumps([selector, value])})"
        )

    def heap_bytes(self) -> int:
        """Of JavaScript, after a collection of what nobody needs."""
        self.call("HeapProfiler.collectGarbage")
        return int(self.call("Runtime.getHeapUsage")["usedSize"])

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=phone)

    def bring_to_front(self) -> None:
        self.call("Page.bringToFront")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """As PNG; `whole`: all of the page, not what the window shows of it."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, optimizeForSpeed=False)
        path.write_bytes(base64.b64decode(answer["data"]))


def _pipe() -> tuple[int, int]:
    """Its end to read and its end to write."""
    ends = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _LOWEST_FD))
        os.close(end)
    return ends[0], ends[1]

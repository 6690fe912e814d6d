"""The live screen of `lmcache top`, on curses. A thread asks the server, so that keys work while it does not answer."""

from __future__ import annotations

import contextlib
import curses
import locale
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from lmcache.cli.output import columns_of, printable, seconds_text
from lmcache.cli.top_figures import TABLES, Sample, arranged, cells, headline, picture, take
from lmcache.errors import LMCacheError, ResourceError

_KEY_MILLISECONDS = 100
_INTERVALS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_ESCAPE, _BACKSPACE, _ENTER, _TAB = 27, (8, 127, curses.KEY_BACKSPACE), (10, 13, curses.KEY_ENTER), 9
_REPAINT = (12, curses.KEY_RESIZE)  # Ctrl-L
_ESCAPE_MILLISECONDS = 25  # after which Esc is no beginning of another key
_JOIN_SECONDS = 0.5
_HELP = (
    "Tab, arrows left and right   next table: engines, adapters, tenants",
    "s                            sort by the next column",
    "r                            the other way round",
    "arrows up and down           scroll",
    "/                            filter: rows that have the text; Enter keeps it, Esc ends it",
    "space                        pause, and go on",
    "+ -                          a longer or a shorter interval",
    "Ctrl-L                       paint everything anew",
    "q                            quit",
    "",
    "Rates are those of the last interval; - is what is not known yet.",
)


def show(url: str, interval_seconds: float, timeout_seconds: float) -> int:
    """Until somebody quits: the exit code."""
    locale.setlocale(locale.LC_ALL, "")
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
    sampler = _Sampler(url, interval_seconds, timeout_seconds)
    try:
        return curses.wrapper(lambda window: _Screen(window, sampler).run())
    except curses.error as error:
        raise ResourceError(
            f"The terminal cannot show this ({error}): lmcache top --once prints one interval."
        ) from None
    except KeyboardInterrupt:
        return 0
    finally:
        sampler.close()


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)  # through what restores the terminal


class _Sampler:
    """Asks the server again and again. Any thread may read `latest`."""

    def __init__(self, url: str, interval_seconds: float, timeout_seconds: float) -> None:
        self.url = url
        self.interval_seconds = interval_seconds
        self._timeout_seconds = timeout_seconds
        self._wake = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._samples: tuple[Sample | None, Sample | None] = None, None
        self._fault, self._silent_since = "", 0.0
        self._count = 0
        self._thread = threading.Thread(target=self._run, name="lmcache-top", daemon=True)
        self._thread.start()

    def latest(self) -> tuple[int, Sample | None, Sample | None, str]:
        """A number that grows with each look, the sample before the latest, the latest, and why none came since."""
        with self._lock:
            fault = self._fault
            if fault:
                fault = f"no figures for {seconds_text(time.monotonic() - self._silent_since)}: {fault}"
            return self._count, *self._samples, fault

    def hurry(self) -> None:
        self._wake.set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._closed:
            sample, fault = None, ""
            try:
                sample = take(self.url, self._timeout_seconds)
            except LMCacheError as error:
                fault = str(error)
            with self._lock:
                self._count += 1
                if sample is not None:
                    self._samples, self._fault = (self._samples[1], sample), ""
                elif not self._fault:
                    self._silent_since = time.monotonic()
                if sample is None:
                    self._fault = fault
            self._wake.wait(self.interval_seconds)
            self._wake.clear()


@dataclass
class _Order:
    column: int = 0
    descending: bool = False
    first_row: int = 0


@dataclass
class _Shown:
    """What the keys have chosen."""

    table: str = next(iter(TABLES))
    wanted: str = ""
    asks: bool = False  # for the filter
    helps: bool = False
    paused: bool = False
    orders: dict[str, _Order] = field(default_factory=lambda: {name: _Order() for name in TABLES})

    @property
    def order(self) -> _Order:
        return self.orders[self.table]


class _Screen:
    def __init__(self, window: Any, sampler: _Sampler) -> None:
        self._window = window
        self._sampler = sampler
        self._shown = _Shown()
        self._seen = sampler.latest()
        window.timeout(_KEY_MILLISECONDS)
        curses.set_escdelay(_ESCAPE_MILLISECONDS)
        with contextlib.suppress(curses.error):
            curses.curs_set(0)

    def run(self) -> int:
        self._draw()
        while True:
            key = self._window.getch()
            if key != -1 and not self._took(key):
                return 0
            latest = self._sampler.latest()
            if not self._shown.paused and (latest[0] != self._seen[0] or latest[3]):
                self._seen = latest
                self._draw()
            elif key != -1:
                self._draw()

    # ---- keys --------------------------------------------------------------------------------------------------------
    def _took(self, key: int) -> bool:
        """Whether to go on."""
        shown = self._shown
        if key in _REPAINT:
            self._window.clear()
        elif shown.asks:
            self._filter(key)
        elif shown.helps:
            shown.helps = False
        elif key == ord("q"):
            return False
        elif key in (ord("h"), ord("?")):
            shown.helps = True
        elif key in (_TAB, curses.KEY_RIGHT, curses.KEY_LEFT):
            names = list(TABLES)
            shown.table = names[(names.index(shown.table) + (-1 if key == curses.KEY_LEFT else 1)) % len(names)]
        elif key == ord("s"):
            shown.order.column = (shown.order.column + 1) % len(TABLES[shown.table])
            shown.order.descending = shown.order.column > 0  # names upwards, numbers from the largest
        elif key == ord("r"):
            shown.order.descending = not shown.order.descending
        elif key in (curses.KEY_UP, curses.KEY_DOWN):
            shown.order.first_row = max(0, shown.order.first_row + (1 if key == curses.KEY_DOWN else -1))
        elif key == ord("/"):
            shown.asks, shown.wanted = True, ""
        elif key == ord(" "):
            shown.paused = not shown.paused
        elif key in (ord("+"), ord("-")):
            self._change_interval(longer=key == ord("+"))
        return True

    def _filter(self, key: int) -> None:
        shown = self._shown
        if key == _ESCAPE:
            shown.asks, shown.wanted = False, ""
        elif key in _ENTER:
            shown.asks = False
        elif key in _BACKSPACE:
            shown.wanted = shown.wanted[:-1]
        elif 32 <= key < 127:
            shown.wanted += chr(key)

    def _change_interval(self, *, longer: bool) -> None:
        seconds = self._sampler.interval_seconds
        others = [step for step in _INTERVALS if (step > seconds if longer else step < seconds)]
        if others:
            self._sampler.interval_seconds = others[0] if longer else others[-1]
            self._sampler.hurry()

    # ---- drawing -----------------------------------------------------------------------------------------------------
    def _draw(self) -> None:
        self._window.erase()
        height, width = self._window.getmaxyx()
        for number, (text, style) in enumerate(self._lines(height)[:height]):
            with contextlib.suppress(curses.error):  # the last place of a screen cannot be written
                self._window.addnstr(number, 0, printable(text), max(0, width - 1), style)
        self._window.refresh()

    def _lines(self, height: int) -> list[tuple[str, int]]:
        shown = self._shown
        _, before, sample, fault = self._seen
        pause = ", paused" if shown.paused else ""
        about = (
            f", version {sample.status['version']}, up {seconds_text(sample.status['uptime_seconds'])}"
            if sample
            else ""
        )
        every = f"every {self._sampler.interval_seconds:g} s"
        lines = [(f"lmcache top - {self._sampler.url}{about}, {every}{pause}", curses.A_BOLD)]
        if fault:
            lines.append((fault, curses.A_REVERSE))
        if shown.helps:
            return [*lines, ("", 0), *((text, 0) for text in _HELP)]
        if sample is None:
            return lines if fault else [*lines, ("asking ...", 0)]
        seen = picture(before, sample)
        lines += [(text, curses.A_DIM if fault else 0) for text in headline(seen.summary)]
        lines += [("", 0), (self._tabs(), 0)]
        columns = TABLES[shown.table]
        order = shown.order
        rows = arranged(
            seen.tables[shown.table], columns[order.column].key, descending=order.descending, wanted=shown.wanted
        )
        heads = [
            column.head + (("v" if order.descending else "^") if number == order.column else "")
            for number, column in enumerate(columns)
        ]
        order.first_row = min(order.first_row, max(0, len(rows) - 1))
        head, *body = columns_of(heads, cells(columns, rows))
        lines.append((head, curses.A_REVERSE))
        lines += [(text, 0) for text in body[order.first_row :]] or [(f"no {shown.table}", curses.A_DIM)]
        foot = f"filter: {shown.wanted}_" if shown.asks else ""
        return [*lines[: height - 1], (foot, curses.A_BOLD)] if foot else lines

    def _tabs(self) -> str:
        names = " ".join(f"[{name}]" if name == self._shown.table else f" {name} " for name in TABLES)
        wanted = f"   only with {self._shown.wanted!r}" if self._shown.wanted and not self._shown.asks else ""
        return f"{names}{wanted}   h: help"

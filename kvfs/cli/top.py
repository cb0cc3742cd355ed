"""`kvfs top`: a live view of a mount, drawn again every few seconds.

A thread asks the daemon, so that keys work while it does not answer. The top line tells of a
takeover, beside the last figures. `--once` waits for two looks, prints them and ends. Not for the
shape of a frame (`frame`), nor for rates (`kvfs.rates`).
"""

import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from kvfs.cli import FiniteRange, is_kvfs, kvfs_mount, mounted_argument
from kvfs.cli.frame import SORTS, TopFrame, View
from kvfs.cli.screen import screen
from kvfs.control import request_within
from kvfs.errors import ConfigError, ControlError, KvfsError
from kvfs.rates import Look

KEY_WAIT = 0.1  # s after which the size of the terminal is looked at again
PATIENCE = 3.0  # s for an answer
ROWS_ONCE = 1000
OBJECTS = 20
EVENTS = 3
QUIT = {"q", "\x03"}
PAGE = 10
KEYS = {"\x1b[A": -1, "\x1b[B": 1, "\x1b[5~": -PAGE, "\x1b[6~": PAGE, "k": -1, "j": 1}


class Poller:
    """Asks each `interval` seconds, until `stop` is set."""

    def __init__(self, mountpoint: Path, interval: float) -> None:
        self.mountpoint = mountpoint
        self.interval = interval
        self.order = "hot"
        self.stop = threading.Event()
        self.frame = TopFrame()
        self.gone = False
        self.failed: KvfsError | None = None  # why the last look failed, if one ever did
        self._drawn = threading.Event()  # unset: there is something new

    def run(self) -> None:
        while not self.stop.is_set():
            began = time.monotonic()
            self.look()
            self.stop.wait(max(0.0, began + self.interval - time.monotonic()))

    def look(self) -> None:
        """Ask for everything once."""
        try:
            status = request_within(self.mountpoint, PATIENCE, "status")
            look = Look(time.monotonic(), status)
            self.frame = self.frame.after(look, self._objects(), self._events())
        except KvfsError as error:
            self.failed = error
            self.gone = not is_kvfs(self.mountpoint)
            self.frame = self.frame.without_answer(time.monotonic(), str(error))
        self._drawn.clear()

    def _objects(self) -> dict[str, Any]:
        """Return the objects; none if the daemon is of an older version, without that verb."""
        try:
            return request_within(
                self.mountpoint, PATIENCE, "objects", order=self.order, count=OBJECTS
            )
        except ControlError as error:
            return {"problem": str(error)}

    def _events(self) -> tuple[dict[str, Any], ...]:
        """Return the latest events; none if the daemon is of an older version."""
        try:
            found = request_within(self.mountpoint, PATIENCE, "events", count=EVENTS)
        except ControlError:
            return ()
        return tuple(found["events"])

    def is_new(self) -> bool:
        """Return whether there is something new to draw; the caller then draws it."""
        new = not self._drawn.is_set()
        self._drawn.set()
        return new


@click.command
@mounted_argument
@click.option("--once", is_flag=True, help="Print one frame, after two measurements, and end.")
@click.option(
    *("-i", "--interval"),
    type=FiniteRange(0.2, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two measurements.",
)
def command(mountpoint: Path, *, once: bool, interval: float) -> None:
    """Show live activity: tiers, namespaces, hot objects, events.

    "opened" counts the bytes of opened files: the kernel moves the bytes, and kvfs does not see
    them. "open p50, p99" are the times that half and 99 % of the opens kept.

    Keys: q quits, s sorts namespaces by another column, r reverses the order, o switches between
    the hottest and the largest objects, arrows and page keys scroll.
    """
    kvfs_mount(mountpoint)
    poller = Poller(mountpoint, interval)
    if once:
        _once(poller)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("kvfs top needs a terminal; --once prints one frame into a pipe or file")
    console = Console(highlight=False)
    thread = threading.Thread(target=poller.run, daemon=True)
    with _keys() as terminal, Live(console=console, screen=True, auto_refresh=False) as live:
        thread.start()
        try:
            _draw(poller, console, live, terminal)
        except KeyboardInterrupt:
            return
        finally:
            poller.stop.set()
    if poller.gone:
        raise KvfsError(f"{mountpoint} is not mounted any more")


def _once(poller: Poller) -> None:
    poller.look()
    if poller.frame.look is not None:
        time.sleep(poller.interval)
        poller.look()
    if poller.frame.look is None and poller.failed is not None:
        raise poller.failed
    console = screen()
    columns = os.environ.get("COLUMNS", "")
    if not console.is_terminal and columns.isdecimal() and int(columns):
        console.width = int(columns)
    console.print(poller.frame.render(View(keys=False), console.width, ROWS_ONCE))


def _draw(poller: Poller, console: Console, live: Live, terminal: int) -> None:
    """Draw until a key or the end of the mount stops it."""
    view, size = View(), (0, 0)
    while not poller.gone:
        now = console.size.width, console.size.height
        key = _key(terminal)
        if key in QUIT:
            return
        before, view = view, _changed(view, key)
        if poller.order != view.order:
            poller.order = view.order
        if poller.is_new() or view != before or now != size:
            size = now
            live.update(poller.frame.render(view, *size), refresh=True)


def _changed(view: View, key: str) -> View:
    if key == "s":
        after = (SORTS.index(view.sort) + 1) % len(SORTS)
        return view._replace(sort=SORTS[after], first=0)
    if key == "r":
        return view._replace(reverse=not view.reverse, first=0)
    if key == "o":
        return view._replace(order="large" if view.order == "hot" else "hot")
    return view._replace(first=max(0, view.first + KEYS.get(key, 0)))


@contextmanager
def _keys() -> Iterator[int]:
    """Set the terminal to give each key at once and to echo none."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield terminal
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _key(terminal: int) -> str:
    """Return the key that was pressed within KEY_WAIT seconds, or ""."""
    ready, _, _ = select.select([terminal], [], [], KEY_WAIT)
    if not ready:
        return ""
    read = os.read(terminal, 16)
    return read.decode(errors="replace") if read else "q"  # the terminal went away

"""One frame of `kvfs top`, for a number of columns and rows.

Contract: `after` and `without_answer` give the next frame, `render` draws it. A narrow terminal
loses the least important columns first; the frame counts the rows that do not fit. Not for asking,
nor for keys.
"""

import textwrap
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvfs.cli import human
from kvfs.cli.screen import duration, line
from kvfs.rates import (
    Look,
    Opens,
    Rates,
    between,
    errors_of,
    eviction_of,
    opens_of,
    quota_share,
    reserved_of,
    sample_of,
    staging_of,
    taken_share,
)

SORTS = ("bytes", "objects", "opens", "hits", "misses", "name")
# Sizes for which the hit ratio is estimated, as multiples. The first column also has the accesses
# that the sample has seen, before there are estimates.
TIMES = ("1", "0.5", "2", "4")
WIDEST = 160  # columns from which on everything is shown
WIDER = 130
WIDE = 100
MIDDLE = 70
LEAST = 3  # rows of a table, however low the terminal is
OBJECTS_PART = 3  # objects get a third of the rows that the tables of tiers leave
BAR = 10
INDENT = " " * len("HH:MM:SS ")


class View(NamedTuple):
    """The choices of the user: sorting, ranking of objects, and scroll position."""

    sort: str = "bytes"
    reverse: bool = False
    order: str = "hot"
    first: int = 0  # of the namespaces
    keys: bool = True  # show what the keys do


class TopFrame(NamedTuple):
    """The last answers of the daemon, and the problem since then, if there is one."""

    look: Look | None = None
    rates: Rates | None = None
    objects: dict[str, Any] = {}  # noqa: RUF012 (it is never changed)
    events: tuple[dict[str, Any], ...] = ()  # the latest, the oldest first
    now: float = 0.0  # s, monotonic, of the last request without an answer
    problem: str = ""

    def after(
        self, look: Look, objects: dict[str, Any], events: tuple[dict[str, Any], ...] = ()
    ) -> "TopFrame":
        """Return the next frame after an answer of the daemon."""
        rates = None if self.look is None else between(self.look, look)
        return TopFrame(look, rates, objects, events)

    def without_answer(self, now: float, problem: str) -> "TopFrame":
        """Return the next frame after a failed request: the last figures stay visible."""
        return self._replace(now=now, problem=problem, rates=None)

    def render(self, view: View, width: int, height: int) -> RenderableType:
        """Draw the frame in at most `width` columns and `height` rows."""
        if self.look is None:
            return line(self.problem or "asking the daemon")
        status = self.look.status
        head: list[RenderableType] = [*self._head(self.look, view)]
        tiers = _tiers(status, self.rates, width)
        flows = _flows(status, self.rates)
        lines = max(1, -(-len(flows.plain) // max(1, width)))
        fixed = len(head) + 1 + len(status["tiers"]) + lines + len(self.events)
        left = max(2 * LEAST, height - fixed - 4)  # two headers, and two lines for the omitted rows
        found = self.objects.get("objects", [])
        for_objects = min(len(found), max(LEAST, left // OBJECTS_PART))
        for_spaces = max(LEAST, left - for_objects)
        spaces = _namespaces(status, self.rates, view, width, for_spaces)
        free = left - for_objects - min(for_spaces, len(status["namespaces"]))
        return Group(
            *(*head, tiers, flows, *spaces, *_objects(self.objects, view, width, for_objects)),
            *_events(self.events, width, free),
        )

    def _head(self, look: Look, view: View) -> list[Text]:
        status = look.status
        takeovers = status["takeovers"]
        first = (
            f"kvfs {status['version']}  {status['mountpoint']}  up {duration(status['uptime_s'])}  "
            f"{takeovers} takeovers  passthrough {'on' if status['passthrough']['on'] else 'off'}"
        )
        lines = [Text(line(first).plain, style="bold", no_wrap=True, overflow="ellipsis")]
        if self.problem:
            since = self.now - look.at
            said = f"last answer {since:.0f} s ago, perhaps a takeover: {self.problem}"
            lines.append(
                Text(line(said).plain, style="bold red", no_wrap=True, overflow="ellipsis")
            )
        elif status.get("state") == "detached":  # an earlier daemon has none
            text = "the mount is detached: its daemon ends after the last close of a file"
            lines.append(Text(text, style="red"))
        elif not status["keeper_pid"]:
            lines.append(Text("the keeper is dead: the mount ends with its daemon", style="red"))
        if view.keys:
            keys = f"q quit  s sort ({view.sort})  r reverse  o {view.order}  arrows scroll"
            lines.append(Text(keys, style="dim", no_wrap=True, overflow="ellipsis"))
        return lines


def _table(
    width: int, columns: list[tuple[str, int]], rows: list[list[str]], *, left: tuple[str, ...]
) -> Table:
    """Return a table with the columns that the width allows. Each row is one line."""
    made = Table(box=None, header_style="bold", width=width, pad_edge=False, expand=False)
    for name, least in columns:
        if width >= least:
            made.add_column(
                name,
                justify="left" if name in left else "right",
                no_wrap=True,
                overflow="ellipsis",
                ratio=1 if name in left[:1] else None,
            )
    for cells in rows:
        shown = (cell for cell, (_, least) in zip(cells, columns, strict=True) if width >= least)
        made.add_row(*map(line, shown))
    return made


TIERS = [
    *(("tier", 0), ("full", MIDDLE), ("used", 0), ("reserved", 80), ("capacity", 0)),
    *(("dirty", MIDDLE), ("objects", WIDE), ("hits/s", MIDDLE), ("state", 0)),
]


def _tiers(status: Any, rates: Rates | None, width: int) -> Table:  # noqa: ANN401
    rows = []
    for name, tier in status["tiers"].items():
        capacity, used = tier["capacity_bytes"], tier["used_bytes"]
        share = taken_share(tier)
        filled = round(share * BAR)
        sealed = min(filled, round(used / capacity * BAR)) if capacity else 0
        bar = "#" * sealed + "+" * (filled - sealed) + "." * (BAR - filled)
        why = f": {tier['why']}" if tier["why"] else ""
        cells = [
            name,
            f"{bar} {share:4.0%}" if capacity else "",
            human(used),
            human(reserved_of(tier)) if capacity else "-",
            human(capacity) if capacity else "-",
            f"{tier['dirty_objects']}, {human(tier['dirty_bytes'])}" if name == "s3" else "",
            str(tier["objects"]),
            _rate(rates.hits.get(name, 0.0) if rates else None),
            f"{tier['state']}{why}",
        ]
        rows.append(cells)
    return _table(width, TIERS, rows, left=("state", "tier", "full"))


def _rate(found: float | None) -> str:
    if found is None:
        return "-"
    return f"{found:.0f}" if found >= 10 or found == 0 else f"{found:.1f}"  # noqa: PLR2004


def _flows(status: Any, rates: Rates | None) -> Text:  # noqa: ANN401
    """Return the rates of the flows, in one line or more."""

    def rate(name: str, size: str = "") -> str:
        if rates is None:
            return "-"
        bytes_ = f" ({human(int(rates.flows[size]))}/s)" if size else ""
        return _rate(rates.flows[name]) + bytes_

    parts = [
        f"opens/s {rate('opens', 'opened_bytes')}",
        f"open p50, p99 {_times(rates)}",
        f"misses/s {rate('misses')}",
        f"written {_bytes(rates.flows['written_bytes'] if rates else None)}",
        *(f"{name} {count}" for name, count in errors_of(status).items()),
        f"sealed/s {rate('sealed')}",
        f"demote/s {rate('demoted')}",
        f"promote/s {rate('promoted')}",
        f"drop/s {rate('dropped')}",
    ]
    if "s3" in status["tiers"]:
        bucket = status["tiers"]["s3"]
        parts += [
            f"oldest dirty {bucket['oldest_dirty_s']:.0f} s",
            f"failures {bucket['failures']}",
            f"upload/s {rate('uploads', 'upload_bytes')}",
            f"hydrate/s {rate('hydrated', 'hydrated_bytes')}",
            f"spill/s {rate('spilled')}",
        ]
    if status.get("pool"):  # an earlier daemon has none
        parts += _pool(status["pool"], rates)
    parts += [f"{name.replace('_', ' ')} {status[name]}" for name in ("jobs", "writers")]
    parts += [f"handles {status['open_handles']}", f"trash {status['trash']}"]
    return Text("  ".join(parts))


def _pool(pool: dict[str, Any], rates: Rates | None) -> list[str]:
    """Return the state and the flows of the pool."""
    index, counters = pool["index"], pool["counters"]
    flows = rates.flows if rates else {}
    down = "down" if index.get("asked", True) else "not asked yet"  # an earlier daemon tells less
    up = "full" if index.get("full") else "up"
    return [
        f"pool {pool.get('nodes_live', '-')} nodes",  # an earlier daemon does not count them
        f"index {up if index['up'] else down}",
        *([] if pool["serves"] else ["serves nobody"]),
        f"found/s {_rate(flows.get('found'))}",
        f"pool hits/s {_rate(rates.hits.get('pool') if rates else None)}",
        f"fetched {_bytes(flows.get('fetched_bytes'))}",
        f"served {_bytes(flows.get('served_bytes'))}",
        f"lag {pool['lag_s']:.1f} s",
        f"conflicts {counters['conflicts']}",
    ]


def _times(rates: Rates | None) -> str:
    """Return the bounds of the histogram that half and 99 % of the opens kept."""
    found = [f"<{bound * 1e3:g} ms" for bound in rates.open_times] if rates else []
    return " ".join(found) or "-"


def _bytes(found: float | None) -> str:
    return "-" if found is None else f"{human(int(found))}/s"


NAMESPACES = [
    *(("namespace", 0), ("bytes", 0), ("writing", MIDDLE), ("quota", MIDDLE), ("objects", WIDE)),
    *(("opens/s", MIDDLE), ("opened", WIDER), ("written", WIDER)),
    *(("misses", MIDDLE), ("hits now", 0), ("hits", 0)),
    *((f"at x{at}", WIDEST) for at in TIMES),
    ("eviction", WIDE),
]


def _namespaces(
    status: Any,  # noqa: ANN401
    rates: Rates | None,
    view: View,
    width: int,
    rows: int,
) -> list[RenderableType]:
    now = rates.opens if rates else {}
    moved = rates.bandwidth if rates else {}
    key, highest = _sorting(view.sort, now)
    found = sorted(status["namespaces"], key=key, reverse=highest != view.reverse)
    first = min(view.first, max(0, len(found) - rows))
    shown = []
    for one in found[first : first + rows]:
        opens, lately, bytes_ = opens_of(one), now.get(one["name"]), moved.get(one["name"])
        ratios = one["hit_ratio_at"]
        cells = [
            one["name"],
            human(one["bytes"]),
            human(staging_of(one)),
            _percent(quota_share(one)),
            str(one["objects"]),
            _rate(lately.opened if lately else None),
            _bytes(bytes_.opened if bytes_ else None),
            _bytes(bytes_.written if bytes_ else None),
            str(int(opens.misses)),
            _percent(lately.ratio if lately else None),
            _percent(opens.ratio),
            sample_of(one) or _percent(ratios.get(TIMES[0])),
            *(_percent(ratios.get(at)) for at in TIMES[1:]),
            eviction_of(one),
        ]
        shown.append(cells)
    made = _table(width, NAMESPACES, shown, left=("namespace", "eviction"))
    if len(shown) == len(found):
        return [made]
    left_out = f"namespaces {first + 1} to {first + len(shown)} of {len(found)}"
    return [made, Text(left_out, style="dim")]


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def _sorting(sort: str, now: dict[str, Opens]) -> tuple[Callable[[Any], Any], bool]:
    """Return the sort key, and whether the highest is first."""
    if sort == "name":
        return lambda one: one["name"], False
    keys: dict[str, Callable[[Any], Any]] = {
        "bytes": lambda one: one["bytes"],
        "objects": lambda one: one["objects"],
        "opens": lambda one: now.get(one["name"], Opens()).opened,
        "hits": lambda one: opens_of(one).ratio or 0.0,
        "misses": lambda one: opens_of(one).misses,
    }
    return keys[sort], True


OBJECTS = [("object", 0), ("size", 0), ("opens", 0), ("tiers", MIDDLE), ("dirty", WIDE)]


def _objects(found: dict[str, Any], view: View, width: int, rows: int) -> list[RenderableType]:
    if "problem" in found:
        return [Text(line(found["problem"]).plain, style="dim", no_wrap=True, overflow="ellipsis")]
    if found.get("order") != view.order or not found["objects"]:
        return [Text(f"no {view.order} objects yet", style="dim")]
    shown = [
        [
            *(one["path"], human(one["size"]), str(one["opens"]), "+".join(one["tiers"])),
            "yes" if one["dirty"] else "",
        ]
        for one in found["objects"][:rows]
    ]
    return [_table(width, OBJECTS, shown, left=("object", "tiers"))]


def _events(found: tuple[dict[str, Any], ...], width: int, free: int) -> list[Text]:
    """Return the latest events, the last one first: a line for each, and `free` lines in all."""
    lines = []
    for event in reversed(found):
        at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        said = event.get("text") or ", ".join(
            f"{name} {value}" for name, value in event.items() if name not in {"time", "kind"}
        )
        text = f"{at} {event.get('level', event['kind'])} {said}"
        wrapped = textwrap.wrap(
            *(line(text).plain, max(width, 2 * len(INDENT))),
            subsequent_indent=INDENT,
            max_lines=1 + max(0, free),
            placeholder=" …",
        )
        free -= len(wrapped) - 1
        lines += [Text(one, style="dim", no_wrap=True, overflow="ellipsis") for one in wrapped]
    return lines

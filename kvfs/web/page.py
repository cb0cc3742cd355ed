"""The page over HTTP: four files, and five kinds of JSON.

Contract: the page has only the paths of PATHS, and each only its own parameters. A malformed
request is 400. `serving.Handler` decides which clients get answers. Every answer forbids the
browser to load anything from elsewhere. The page shows a mount without paths on this machine,
options, or the place of the bucket. Not for sampling.
"""

import json
import math
import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from kvfs.clock import REAL, Clock
from kvfs.control import request_within
from kvfs.errors import ControlError, KvfsError
from kvfs.rates import (
    errors_of,
    eviction_of,
    opens_of,
    quota_share,
    reserved_of,
    sample_of,
    staging_of,
    taken_share,
)
from kvfs.web.history import LENGTHS, History
from kvfs.web.serving import BadRequest, Handler, Snapshot, ask_daemon

STATIC = Path(__file__).parent / "static"
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
RANKED = 5.0  # s
COUNT = 50
EVENTS = 20
EACH = 10.0  # a second
LONGEST = 1.0  # s that a question waits for its turn
PATIENCE = 5.0  # s
ORDERS = ("hot", "large")
_END = r"\s'\",;:)\]"  # what ends a path in a text
_PLACE = rf"[a-z][a-z0-9+.-]*://[^\s'\",;)\]]*[^{_END}]|(?<=')/[^']+(?=')|(?<![\w/])/[^{_END}]+"
_BAD_ESCAPE = re.compile(r"%(?![0-9a-fA-F]{2})")
_TIERS = ("capacity_bytes", "used_bytes", "objects", "hits", "state", "state_s")
_BUCKET = (
    *("dirty_objects", "dirty_bytes", "dirty_most_bytes", "oldest_dirty_s", "to_delete"),
    *("uploads", "downloads", "failures", "conflicts"),
)
_POOL = ("found", "fetched", "fetched_bytes", "failed", "served", "served_bytes", "conflicts")
_FACTS = (
    *("version", "mountpoint", "takeovers", "uptime_s", "objects", "census_done"),
    *("open_handles", "writers", "jobs", "trash", "passthrough"),
)


class BusyError(KvfsError):
    """The question was refused, because the browsers ask too much at the moment."""


class Questions:
    """The questions to the daemon beside its status: rankings of objects, and one object's life.

    The daemon gives each ranking once in RANKED seconds, for any number of browsers. It gets at
    most EACH questions a second about single objects. A question that would have to wait longer
    than LONGEST is refused. So a thousand browsers cost the daemon hardly more than one.
    """

    def __init__(self, mountpoint: Path, clock: Clock = REAL) -> None:
        self.mountpoint = mountpoint
        self._clock = clock
        self._rankings = {
            order: Snapshot(
                partial(ask_daemon, mountpoint, "objects", order=order, count=COUNT), RANKED
            )
            for order in ORDERS
        }
        self._events = Snapshot(partial(ask_daemon, mountpoint, "events"), RANKED)
        # Paths below the mount stay.
        self._place = re.compile(rf"({re.escape(str(mountpoint))}(?=[{_END}/]|$))|{_PLACE}")
        self._lock = threading.Lock()
        self._next = 0.0

    def ranking(self, order: str) -> dict[str, Any] | None:
        """Return the first COUNT objects; None without an answer. KeyError: no such order."""
        return self._rankings[order].look(PATIENCE)

    def events(self) -> list[dict[str, Any]] | None:
        """Return the latest events, the last one first; None without an answer.

        Their texts have no addresses, and no paths of this machine outside the mount.
        """
        found = self._events.look(PATIENCE)
        if found is None:
            return None
        return [
            {name: self._without_places(value) for name, value in event.items()}
            for event in reversed(found["events"][-EVENTS:])
        ]

    def _without_places(self, value: object) -> object:
        if not isinstance(value, str):
            return value
        return self._place.sub(lambda found: found[1] or "…", value)

    def object(self, path: str) -> dict[str, Any]:
        """Return a file or directory, by a path on the mount or below its top. Raises KvfsError."""
        self._wait_turn()
        below = path.removeprefix(f"{self.mountpoint}/")
        below = "" if below == str(self.mountpoint) else below
        return request_within(self.mountpoint, PATIENCE, "stat", path=below)

    def _wait_turn(self) -> None:
        """Wait for the turn of a question. Raises BusyError if the wait would be too long."""
        with self._lock:
            now = self._clock.now()
            turn = max(now, self._next)
            if turn - now > LONGEST:
                raise BusyError("too many requests at the moment: try again in a second")
            self._next = turn + 1 / EACH
        self._clock.sleep(turn - now)


class Sources(NamedTuple):
    """The sources of the answers."""

    history: History
    questions: Questions


Parameters = Mapping[str, str]


def _now(sources: Sources, _: Parameters) -> Any:  # noqa: ANN401 (JSON)
    """Return the present values; `up` is false if the daemon does not answer."""
    look, rates = sources.history.last()
    if look is None:
        return {"up": False}
    status = look.status
    return {
        "up": True,
        **{name: status[name] for name in _FACTS},
        "keeper": bool(status["keeper_pid"]),
        "detached": status.get("state") == "detached",  # an earlier daemon has none
        "tiers": {
            name: {
                **{field: tier[field] for field in (*_TIERS, *_BUCKET) if field in tier},
                "reserved_bytes": reserved_of(tier),
                "taken": taken_share(tier),
            }
            for name, tier in status["tiers"].items()
        },
        "pool": _pool(status.get("pool")),  # an earlier daemon has none
        "flows": rates.flows if rates else None,
        # Infinity is no JSON: the slowest part of the histogram has no bound.
        "open_times_s": [t if math.isfinite(t) else None for t in rates.open_times]
        if rates
        else [],
        "errors": errors_of(status),
        "namespaces": [
            {
                "name": one["name"],
                "bytes": one["bytes"],
                "writing": staging_of(one),
                "eviction": eviction_of(one),
                "quota": quota_share(one),
                "opened_bytes": rates.bandwidth[one["name"]].opened if rates else None,
                "written_bytes": rates.bandwidth[one["name"]].written if rates else None,
                "objects": one["objects"],
                "misses": opens_of(one).misses,
                "ratio": opens_of(one).ratio,
                "now": rates.opens[one["name"]].ratio if rates else None,
                "opens": rates.opens[one["name"]].opened if rates else None,
                "would_be": one["hit_ratio_at"],
                "sample": sample_of(one),
                "problem": one["problem"],
            }
            for one in status["namespaces"]
        ],
    }


def _pool(pool: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the pool without the places of its index and its nodes."""
    if pool is None:
        return None
    counters = pool["counters"]
    return {
        "up": pool["index"]["up"],
        "full": pool["index"].get("full", False),
        "asked": pool["index"].get("asked", True),  # an earlier daemon does not tell it
        "serves": pool["serves"],
        "nodes": pool.get("nodes_live"),  # an earlier daemon does not count nodes, hits and reads
        "hits": pool.get("hits"),
        "objects": pool["objects"],
        "bytes": pool["bytes"],
        "lag_s": pool["lag_s"],
        **{name: counters.get(name, 0) for name in _POOL},
    }


def _history(sources: Sources, asked: Parameters) -> Any:  # noqa: ANN401
    span = asked.get("span", "hour")
    if span not in LENGTHS:
        raise BadRequest(HTTPStatus.BAD_REQUEST)
    try:
        after = float(asked.get("after", "0"))
    except ValueError:
        after = math.nan
    if not math.isfinite(after):
        raise BadRequest(HTTPStatus.BAD_REQUEST)
    return sources.history.since(span, after, asked.get("namespace"))


def _objects(sources: Sources, asked: Parameters) -> Any:  # noqa: ANN401
    order = asked.get("order", "hot")
    if order not in ORDERS:
        raise BadRequest(HTTPStatus.BAD_REQUEST)
    found = sources.questions.ranking(order)
    if found is None:
        raise BadRequest(HTTPStatus.SERVICE_UNAVAILABLE)
    return found


def _events(sources: Sources, _: Parameters) -> Any:  # noqa: ANN401
    found = sources.questions.events()
    if found is None:
        raise BadRequest(HTTPStatus.SERVICE_UNAVAILABLE)
    return {"events": found}


def _object(sources: Sources, asked: Parameters) -> Any:  # noqa: ANN401
    """Return one object, or only the code of the error."""
    if "\0" in asked.get("path", "\0"):
        raise BadRequest(HTTPStatus.BAD_REQUEST)
    try:
        return sources.questions.object(asked["path"])
    except BusyError:
        raise BadRequest(HTTPStatus.TOO_MANY_REQUESTS) from None
    except ControlError as error:
        away = isinstance(error.__cause__, OSError)  # else the daemon gave its own reason
        code = HTTPStatus.SERVICE_UNAVAILABLE if away else HTTPStatus.NOT_FOUND
        raise BadRequest(code) from None
    except KvfsError:
        raise BadRequest(HTTPStatus.NOT_FOUND) from None


class Endpoint(NamedTuple):
    """A function that answers, and the parameters that it takes."""

    give: Callable[[Sources, Parameters], Any]
    takes: tuple[str, ...] = ()


PATHS = {
    "/api/now": Endpoint(_now),
    "/api/history": Endpoint(_history, ("span", "after", "namespace")),
    "/api/objects": Endpoint(_objects, ("order",)),
    "/api/events": Endpoint(_events),
    "/api/object": Endpoint(_object, ("path",)),
}


class PageHandler(Handler):
    """One connection of a browser. `handler` makes a class that has `sources`."""

    sources: Sources
    headers_of_all = HEADERS

    def answer(self) -> tuple[bytes, str]:
        """Return the body and its type. Raises BadRequest."""
        path, _, query = self.path.partition("?")
        if _BAD_ESCAPE.search(self.path) or not self.path.isascii():
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        if path in FILES:
            name, kind = FILES[path]
            return (STATIC / name).read_bytes(), kind
        if path not in PATHS:
            raise BadRequest(HTTPStatus.NOT_FOUND)
        endpoint = PATHS[path]
        found = endpoint.give(self.sources, _parameters(query, endpoint.takes))
        return json.dumps(found).encode(), "application/json"


def handler(sources: Sources, *, private: bool) -> type[PageHandler]:
    """Return the class of connections to these sources; `private`: to this machine only."""
    return type("Browser", (PageHandler,), {"sources": sources, "private": private})


def _parameters(query: str, takes: tuple[str, ...]) -> Parameters:
    """Return the parameters of a query. Raises BadRequest.

    Names may have any bytes: those that are no UTF-8 become surrogates.
    """
    try:
        pairs = parse_qsl(
            query,
            keep_blank_values=True,
            strict_parsing=bool(query),
            errors="surrogateescape",
            max_num_fields=len(takes),
        )
    except ValueError:
        raise BadRequest(HTTPStatus.BAD_REQUEST) from None
    if len(dict(pairs)) != len(pairs) or not dict(pairs).keys() <= set(takes):
        raise BadRequest(HTTPStatus.BAD_REQUEST)
    return dict(pairs)

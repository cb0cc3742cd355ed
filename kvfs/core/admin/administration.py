"""Commands on namespaces, by name: the verbs behind `kvfs ns` and `kvfs status`.

Contract: handlers for the control socket. They take texts and plain values, and return plain
values. If they fail, they raise KvfsError with the reason, and change nothing. A repeated request
(`again`) succeeds if a daemon that died without an answer has carried it out. Not for the meaning
of the commands (`Lifecycle`).
"""

import os
from collections.abc import Awaitable, Callable
from typing import Any

from kvfs.catalog import ROOT_INO
from kvfs.core.admin.lifecycle import Lifecycle
from kvfs.errors import NotFoundError

HOTTEST = 10  # objects that status shows


def handlers(lifecycle: Lifecycle) -> dict[str, Callable[..., Awaitable[dict[str, Any]]]]:
    """The handlers of the control socket, by verb."""

    async def make(
        name: str,
        settings: dict[str, str],
        uid: int,
        gid: int,
        again: bool = False,  # noqa: FBT001, FBT002 (arguments come by name)
    ) -> dict[str, Any]:
        async with lifecycle.namespaces.pool_making(ROOT_INO, os.fsencode(name)):
            lifecycle.make(name, settings, uid=uid, gid=gid, again=again)
        return await show(name)

    async def change(name: str, settings: dict[str, str]) -> dict[str, Any]:
        directory = lifecycle.directory(name)
        before = lifecycle.namespaces.of(directory).settings.to_text()
        lifecycle.change(directory, settings)
        found = await show(name)
        changed = {
            one: [before[one], now] for one, now in found["settings"].items() if before[one] != now
        }
        return {**found, "changed": changed}

    async def show(name: str) -> dict[str, Any]:
        directory = lifecycle.directory(name)
        found = lifecycle.namespaces.of(directory)
        lifecycle.namespaces.show_opens()
        own = found.ino == directory.ino
        return {
            "name": name,
            "own": own,
            "problem": found.homeless(lifecycle.ledger.tiers.local),
            "note": found.note(lifecycle.ledger.tiers.local),
            **found.describe(),
            "models": lifecycle.namespaces.describe_models([found]),
        }

    async def drop(name: str, again: bool = False) -> dict[str, Any]:  # noqa: FBT001, FBT002
        try:
            directory = lifecycle.directory(name)
        except NotFoundError:
            if not again:
                raise
            return {"dropped": lifecycle.namespaces.last_dropped(name), "before": True}
        lifecycle.drop(directory)
        return {"dropped": directory.ino, "before": False}

    async def listed() -> dict[str, Any]:
        return summary(lifecycle)

    return {
        "ns_create": make,
        "ns_set": change,
        "ns_show": show,
        "ns_drop": drop,
        "ns_list": listed,
    }


def summary(lifecycle: Lifecycle) -> dict[str, Any]:
    """All namespaces, the rest of dropped ones, the models, and the hottest objects."""
    namespaces = lifecycle.namespaces
    return {
        "namespaces": [
            {
                "name": namespaces.name(one.ino),
                "problem": one.homeless(lifecycle.ledger.tiers.local),
                **one.describe(),
            }
            for one in sorted(namespaces, key=lambda one: one.ino != ROOT_INO)
        ],
        "dropped": [
            {
                "ino": one.ino,
                "name": namespaces.name(one.ino),
                "bytes": one.bytes,
                "objects": one.objects,
                "reason": namespaces.drops_of(one.ino).reason,
            }
            for one in namespaces.dropped.values()
        ],
        "models": namespaces.describe_models(namespaces.everything()),
        "hot": [
            {"path": path, "opens": hot.opens}
            for hot in namespaces.hot.top(HOTTEST)
            if (path := lifecycle.catalog.path_of(hot.key))
        ],
    }

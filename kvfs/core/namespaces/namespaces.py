"""Namespaces: what each was told to be, what it holds, and in which order that goes.

Contract: a top-level directory that was given a setting is a namespace, and so is the mount itself
for everything else. An inode says to which one it is accounted (`Inode.namespace`, the number of
the directory); what is made below a directory is accounted to the directory's. Settings are in the
catalog; what a namespace holds is counted from the inodes. Dropped trees are here until nothing
of them is left: whatever is accounted to one is not there any more for anybody who asks.
An open only notes what policies and counters of hot objects see of it (`read`): that follows for
`LATELY` of them at once, or as soon as somebody asks. All methods are synchronous. Not for walking
trees (`Walks`), nor for choosing victims (`Victims`).
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import trio

from kvfs.catalog import ROOT_INO, Batch, Catalog, Inode, keys
from kvfs.core.namespaces.access_log import AccessLog
from kvfs.core.namespaces.namespace import READ, Namespace
from kvfs.core.namespaces.places import Places
from kvfs.errors import ConfigError
from kvfs.fairness.fair_queue import Shares
from kvfs.fairness.hot_objects import HotObjects
from kvfs.s3.keys import Name
from kvfs.settings import Settings
from kvfs.tiers import Bucket, Tier

log = logging.getLogger(__name__)

MOUNT = "."  # the name of the mount's own namespace
LATELY = 32  # opens, some 0.3 ms


class Namespaces:
    """All of a mount. `default` is the mount's own."""

    def __init__(self, catalog: Catalog, *, tiered: bool = False) -> None:
        """`tiered`: the mount has more than one tier."""
        self.catalog = catalog
        self.tiered = tiered
        self.default = Namespace(ROOT_INO, Settings(), tiered=tiered)
        self._all: dict[int, Namespace] = {ROOT_INO: self.default}
        self.dropped: dict[int, Namespace] = {}  # by top-level directory
        self._names: dict[int, bytes] = {}  # that those had
        self._ended: dict[int, Namespace] = {}  # what is open still, of those that are no more
        # Directories to be walked, oldest first, and how often that was asked for.
        self.unaccounted: Counter[int] = Counter()
        self.shares: Shares | None = None  # of what the mount may read in a second, when served
        self._hot = HotObjects()  # by inode
        # Opens that are not looked at yet: namespace, key, parent's key, inode.
        self._lately: list[tuple[Namespace, int, int, int]] = []
        self.limited = False  # whether anybody may have to wait at an open
        self.mortal = False  # whether anything may be gone that has a record and names
        self.prefixes = False  # whether there is one whose paths are prefixes
        self.changed = trio.Event()  # something to walk, or other settings
        self.places = Places(catalog, self.of)
        self.access_log = AccessLog(self.places, self.name)
        for ino, text in catalog.marks(keys.SETTINGS):
            self._load(ino, text)
        for ino, name in catalog.marks(keys.DROPPED):
            self._dropped(ino, name)
        self.unaccounted.update(ino for ino, _ in catalog.marks(keys.UNACCOUNTED))
        self._look_around()

    def _load(self, ino: int, text: bytes) -> None:
        try:
            settings = Settings.from_json(text.decode())
        except (ConfigError, ValueError) as error:  # the latter from what is no JSON, or no UTF-8
            log.error(
                "namespace %d has the default settings, since its own are bad: %s", ino, error
            )
            settings = Settings()
        if ino == ROOT_INO:
            self.default.change(settings)
        else:
            self._all[ino] = Namespace(ino, settings, tiered=self.tiered)

    def __iter__(self) -> Iterator[Namespace]:
        self.settle()
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def of(self, inode: Inode) -> Namespace:
        """The one that it is accounted to, be it dropped."""
        ino = inode.namespace
        found = self._all.get(ino)
        if found is None:
            found = self.dropped.get(ino) or self._ended.get(ino, self.default)
        return found

    def is_dropped(self, inode: Inode) -> bool:
        """Whether all that leads to it is below a directory that was dropped."""
        if not self.dropped:
            return False
        if not inode.links:
            return (inode.ino if inode.is_dir else inode.namespace) in self.dropped
        if len(inode.links) == 1 and not self.unaccounted:
            return inode.namespace in self.dropped
        # It was moved, and what it is accounted to may be old; or it has a name elsewhere.
        return all(self._top(parent) in self.dropped for parent, _ in inode.links)

    def _top(self, ino: int) -> int:
        """The top-level directory above a directory, or itself."""
        while ino not in self.dropped:
            inode = self.catalog.inode(ino)
            if inode is None or not inode.links or inode.links[0][0] == ROOT_INO:
                break
            ino = inode.links[0][0]
        return ino

    def own(self, ino: int) -> Namespace | None:
        """What a directory is the namespace of; None if of none."""
        self.settle()
        return self._all.get(ino)

    def name(self, ino: int) -> str:
        """Of its directory, or the one that it had when it was dropped; "" if it has none."""
        if ino == ROOT_INO:
            return MOUNT
        found = self._names.get(ino, b"")
        inode = self.catalog.inode(ino)
        if inode is not None and inode.links:
            entry = self.catalog.dentry(*inode.links[0])
            found = found if entry is None else entry.name
        return found.decode("utf-8", "surrogateescape")

    def bucket_name(self, inode: Inode, name: bytes = b"") -> Name | None:
        """What a file is called in a bucket, by its first name; None if it has none to be found.

        name: what a file of that name in this directory is, or would be.
        """
        path = [name] if name else []
        if name and inode.ino == ROOT_INO:
            return Name(b"", 0, name)
        at: Inode | None = inode
        while at is not None and at.links and at.ino not in self.dropped:
            entry = self.catalog.dentry(*at.links[0])
            if entry is None:
                return None
            above = at.links[0][0]
            space = self._all.get(at.ino) if above == ROOT_INO and path else None
            if space is not None:
                return Name(entry.name, space.settings.version, b"/".join(reversed(path)))
            path.append(entry.name)
            if above == ROOT_INO:
                return Name(b"", 0, b"/".join(reversed(path)))
            at = self.catalog.inode(above)
        return None

    def last_dropped(self, name: str) -> int:
        """The last directory of a name that was dropped and is not all gone; 0: there is none."""
        return max((ino for ino in self.dropped if self.name(ino) == name), default=0)

    # Settings

    def set(self, ino: int, settings: Settings, batch: Batch) -> None:
        """Give a top-level directory, or the mount itself, settings."""
        batch.mark(keys.SETTINGS, ino, settings.to_json().encode())
        batch.then(lambda: self._changed(ino, settings))

    def wake(self) -> None:
        """There is something to walk."""
        done, self.changed = self.changed, trio.Event()
        done.set()

    def share(self, shares: Shares) -> None:
        """Of what namespaces compete for their parts from now on; call again when its rate is."""
        self.shares = shares
        self._look_around()

    def _look_around(self) -> None:
        shared = self.shares is not None and self.shares.total.rate > 0
        self.limited = shared or any(namespace.limits.on for namespace in self)
        self.prefixes = any(namespace.settings.prefix for namespace in self)
        self.mortal = bool(self.dropped) or any(one.settings.ttl for one in self.everything())

    def read(self, inode: Inode, tier: Tier | Bucket) -> None:
        """An object was opened to read."""
        found = self.of(inode)
        counters = found.counters
        counters[READ[tier.name]] += 1
        counters["read_bytes"] += inode.size
        lately = self._lately
        lately.append((found, inode.key or inode.ino, inode.parent_key, inode.ino))
        if len(lately) == LATELY:
            self.settle()
        if self.access_log.on:
            self.access_log.read(inode, tier.name)

    def unused(self, inodes: Iterable[Inode], now: int) -> list[Inode]:
        """Those whose time of access is to be noted now, as relatime does.

        When it is older than the last change, or than a minute; less, where objects live for a time
        after their last use.
        """
        return [
            one
            for one in inodes
            if one.atime_ns <= one.mtime_ns or now - one.atime_ns > self.of(one).use_step
        ]

    def settle(self) -> None:
        """Have the opens of lately seen."""
        lately, self._lately = self._lately, []
        for space, key, parent, ino in lately:
            space.accesses.see(key, parent, space.parent)
            self._hot.touch(ino)

    @property
    def hot(self) -> HotObjects:
        """By inode; with every open that there was."""
        self.settle()
        return self._hot

    def left(self, inode: Inode, how: str) -> None:
        """An object has gone from here: `dropped_REASON`, or `spilled`."""
        self.of(inode).counters[how] += 1

    def written(self, inode: Inode, charged: int) -> None:
        """An object is complete, and its writer has waited for `charged` bytes of it.

        The rest is owed from now on: of what was mapped, or whose writers closed it together.
        """
        self.settle()
        found = self.of(inode)
        found.counters["written"] += 1
        found.counters["written_bytes"] += inode.size
        found.see(inode)
        if self.access_log.on:
            self.access_log.written(inode)
        if self.shares is not None:
            self.shares.total.charge(max(0, inode.data - charged))

    def _changed(self, ino: int, settings: Settings) -> None:
        self.wake()
        self.places.forget_paths()  # they begin at namespaces
        found = self._all.get(ino)
        if found is None:
            self._all[ino] = Namespace(ino, settings, tiered=self.tiered)
        else:
            found.change(settings)
        self._look_around()

    def forget(self, ino: int, batch: Batch) -> None:
        """Its directory is removed, and was empty."""
        batch.unmark(keys.SETTINGS, ino)
        batch.then(partial(self._end, self._all, ino))

    def _end(self, among: dict[int, Namespace], ino: int) -> None:
        found = among.pop(ino, None)
        if found is not None:
            found.limits.change(Settings())  # who waits there may go
        if found is not None and found.objects:  # open, without a name
            self._ended[ino] = found
        self._look_around()

    def drop(self, ino: int, name: bytes, batch: Batch) -> None:
        """All below this directory, which had that name, is gone from now on; its space follows."""
        batch.unmark(keys.SETTINGS, ino)
        batch.mark(keys.DROPPED, ino, name)
        batch.then(lambda: self._dropped(ino, name))

    def _dropped(self, ino: int, name: bytes) -> None:
        found = self._all.pop(ino, None)
        self._names[ino] = name
        self.dropped[ino] = (
            Namespace(ino, Settings(), tiered=self.tiered) if found is None else found
        )
        self.dropped[ino].limits.change(Settings())  # who waits there may go
        self._look_around()
        self.places.forget_paths()
        self.wake()

    def end_drop(self, ino: int, batch: Batch) -> None:
        """Nothing of it is left."""
        batch.unmark(keys.DROPPED, ino)
        batch.then(lambda: self._cleared(ino))

    def _cleared(self, ino: int) -> None:
        self._end(self.dropped, ino)
        self._names.pop(ino, None)

    def forget_name(self, ino: int, batch: Batch) -> None:
        """The one that a dropped directory had."""
        batch.mark(keys.DROPPED, ino)
        batch.then(lambda: self._names.update({ino: b""}))

    def account_anew(self, ino: int, batch: Batch) -> None:
        """All below this directory is to be accounted as it is itself."""
        batch.mark(keys.UNACCOUNTED, ino)
        batch.then(partial(self.unaccounted.update, [ino]))
        batch.then(self.wake)

    def end_account_anew(self, ino: int, batch: Batch) -> None:
        batch.unmark(keys.UNACCOUNTED, ino)
        batch.then(partial(self.unaccounted.__delitem__, ino))
        batch.then(self.wake)  # it may have more than its quota now

    # Accounts

    def count(self, inode: Inode, costs: Mapping[str, int], bucket: Bucket, sign: int) -> None:
        """A sealed object comes (1) or goes (-1). What no tier has is in no quota.

        costs: bytes of its copies by tier. A quota counts it as if none was packed.
        """
        found = self.of(inode)
        if found.blocks is not None:
            found.blocks.count(inode, [*costs, "s3"] if inode.in_bucket else costs, sign)
        if inode.in_bucket and bucket.mounted:
            found.held[bucket.name] += sign * inode.size
            found.held_objects[bucket.name] += sign
        if not costs:
            found.spilled += sign if inode.in_bucket else 0
            return
        cost = Tier.cost(inode.blocks)
        found.bytes += sign * cost
        found.objects += sign
        for tier, bytes_ in costs.items():
            found.held[tier] += sign * bytes_
            found.held_objects[tier] += sign
        if len(costs) > 1:
            found.clean_bytes += sign * cost
            found.clean_objects += sign
        if self._ended and not found.objects:
            self._ended.pop(found.ino, None)
        if inode.model:
            found.models[inode.model] += sign
            found.model_bytes[inode.model] += sign * cost

    def everything(self) -> Iterator[Namespace]:
        """All, also those that were dropped, and those of which only open files are left."""
        self.settle()
        return chain(self._all.values(), self.dropped.values(), self._ended.values())

    def describe_models(self, spaces: Iterable[Namespace]) -> list[dict[str, Any]]:
        """Whose blocks these hold, for people: the models with most bytes first."""
        objects: Counter[int] = Counter()
        bytes_: Counter[int] = Counter()
        for space in spaces:
            objects.update(space.models)
            bytes_.update(space.model_bytes)
        return [
            {"engine": engine, "model": model, "objects": objects[number], "bytes": size}
            for number, size in bytes_.most_common()
            if objects[number]
            for engine, model in [self.places.models[number]]
        ]

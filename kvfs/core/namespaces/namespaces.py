"""The namespaces of a mount: their settings, their accounts, and dropped namespaces.

Contract: a top-level directory with a setting is a namespace. The mount itself is the namespace of
all other files. An inode's record has the namespace to which it is accounted (`Inode.namespace`,
the number of the directory). A new inode is accounted to the namespace of its directory. Settings
are in the catalog; the accounts are counted from the inodes. `dropped` keeps a dropped namespace
until all its files are removed: no program finds an object that is accounted to it. An open is only
noted (`read`). Policies and counters of hot objects see it later: when the number of noted opens is
`LATELY`, or a caller needs them (`show_opens`). All methods are synchronous. Not for walking trees
(`Walks`), nor for choosing victims (`Victims`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import trio

from kvfs.catalog import ROOT_INO, Batch, Catalog, Inode, keys
from kvfs.core.namespaces.access_log import AccessLog
from kvfs.core.namespaces.drops import Drops
from kvfs.core.namespaces.namespace import READ, Namespace
from kvfs.core.namespaces.places import Places
from kvfs.errors import ConfigError
from kvfs.fairness.fair_queue import Shares
from kvfs.fairness.hot_objects import HotObjects
from kvfs.s3.keys import ObjectName
from kvfs.settings import Settings
from kvfs.tiers import Bucket, OtherNodes, Tier

log = logging.getLogger(__name__)

MOUNT = "."  # the name of the mount's own namespace
LATELY = 32  # opens, some 0.3 ms


class Namespaces:
    """All namespaces of a mount. `default` is the mount's own."""

    def __init__(self, catalog: Catalog, *, tiered: bool = False) -> None:
        """tiered: the mount has more than one tier."""
        self.catalog = catalog
        self.tiered = tiered
        self.default = Namespace(ROOT_INO, Settings(), tiered=tiered)
        self._all: dict[int, Namespace] = {ROOT_INO: self.default}
        self.dropped: dict[int, Namespace] = {}  # by top-level directory
        self._names: dict[int, bytes] = {}  # the names of dropped ones
        self._ended: dict[int, Namespace] = {}  # removed ones of which files are still open
        # Directories to walk, oldest first, each with the number of requests for the walk.
        self.unaccounted: Counter[int] = Counter()
        self.shares: Shares | None = None  # of the mount's bytes a second, once it is served
        self._hot = HotObjects()  # by inode
        # Opens that policies have not seen yet: namespace, key, parent's key, inode.
        self._lately: list[tuple[Namespace, int, int, int]] = []
        self.limited = False  # whether a program may have to wait at an open
        self.mortal = False  # whether an object with a record and names may be gone
        self.prefixes = False  # whether a namespace has prefix=on
        self.changed = trio.Event()  # set when there is a tree to walk, or settings changed
        self.places = Places(catalog, self.of)
        self.access_log = AccessLog(self.places, self.name)
        self._bring_opens: Callable[[], None] = lambda: None
        self._settings_change: Callable[[], None] = lambda: None
        # Called with a namespace whose `pool` was switched: core/pool/announcer.py.
        self.pool_switched: Callable[[int], None] = lambda _ino: None
        # Called with the name of a namespace that a batch drops: core/pool/switches.py.
        self.pool_dropped: Callable[[str, Batch], None] = lambda _name, _batch: None
        # Called with the name that a batch gives to a directory at the top: core/pool/tokens.py.
        self.pool_made: Callable[[bytes, Batch], None] = lambda _name, _batch: None
        # Held while a command makes a directory, by its parent and name: core/pool/pool.py.
        self.pool_making: Callable[[int, bytes], AbstractAsyncContextManager[None]]
        self.pool_making = lambda _parent, _name: nullcontext()
        for ino, text in catalog.marks(keys.SETTINGS):
            self._load(ino, text)
        for ino, value in catalog.marks(keys.DROPPED):
            self._dropped(ino, value)
        self.unaccounted.update(ino for ino, _ in catalog.marks(keys.UNACCOUNTED))
        self._look_around()

    def _load(self, ino: int, text: bytes) -> None:
        try:
            settings = Settings.from_json(text.decode())
        except (ConfigError, ValueError) as error:  # ValueError: no JSON, or no UTF-8
            log.error(
                "%s has the default settings, since its own are bad: %s; set them anew",
                *(self.catalog.named(ino), error),
            )
            settings = Settings()
        if ino == ROOT_INO:
            self.default.change(settings)
        else:
            self._all[ino] = Namespace(ino, settings, tiered=self.tiered)

    def __iter__(self) -> Iterator[Namespace]:
        self.show_opens()
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def of(self, inode: Inode) -> Namespace:
        """The namespace to which an inode is accounted, dropped or not."""
        ino = inode.namespace
        found = self._all.get(ino)
        if found is None:
            found = self.dropped.get(ino) or self._ended.get(ino, self.default)
        return found

    def is_dropped(self, inode: Inode) -> bool:
        """Whether all paths of an inode are below a dropped directory."""
        if not self.dropped:
            return False
        if not inode.links:
            return (inode.ino if inode.is_dir else inode.namespace) in self.dropped
        if len(inode.links) == 1 and not self.unaccounted:
            return inode.namespace in self.dropped
        # It has another name, or it was moved and its record has the old namespace.
        return all(self._top(parent) in self.dropped for parent, _ in inode.links)

    def _top(self, ino: int) -> int:
        """The top-level directory above a directory, or itself."""
        while ino not in self.dropped:
            inode = self.catalog.inode(ino)
            if inode is None or not inode.links or inode.links[0][0] == ROOT_INO:
                break
            ino = inode.links[0][0]
        return ino

    def top_name(self, ino: int) -> str:
        """The name of the top-level directory above a directory, or of itself."""
        return self.name(self._top(ino))

    def own(self, ino: int) -> Namespace | None:
        """The namespace that a directory is; None if it is none."""
        self.show_opens()
        return self._all.get(ino)

    def name(self, ino: int) -> str:
        """The name of a namespace's directory, or its name at the drop; "" if it has none."""
        if ino == ROOT_INO:
            return MOUNT
        found = self._names.get(ino, b"")
        inode = self.catalog.inode(ino)
        if inode is not None and inode.links:
            entry = self.catalog.dentry(*inode.links[0])
            found = found if entry is None else entry.name
        return found.decode("utf-8", "surrogateescape")

    def bucket_name(
        self, inode: Inode, name: bytes = b"", *, dropped: bool = False
    ) -> ObjectName | None:
        """The name of a file in a bucket, from its first name; None if it has no path.

        name: the name of a file in the directory `inode`, which need not exist. dropped: a file in
        a dropped namespace has the name that it had before.
        """
        path = [name] if name else []
        if name and inode.ino == ROOT_INO:
            return ObjectName(b"", 0, name)
        at: Inode | None = inode
        while at is not None and at.links and at.ino not in self.dropped:
            entry = self.catalog.dentry(*at.links[0])
            if entry is None:
                return None
            above = at.links[0][0]
            space = self._all.get(at.ino) if above == ROOT_INO and path else None
            if space is not None:
                return ObjectName(entry.name, space.settings.version, b"/".join(reversed(path)))
            path.append(entry.name)
            if above == ROOT_INO:
                return ObjectName(b"", 0, b"/".join(reversed(path)))
            at = self.catalog.inode(above)
        if dropped and path and at is not None and (space := self.dropped.get(at.ino)) is not None:
            version = space.settings.version
            return ObjectName(self._names[at.ino], version, b"/".join(reversed(path)))
        return None

    def last_dropped(self, name: str) -> int:
        """The last dropped directory of a name that is not all removed; 0: there is none."""
        return max((ino for ino in self.dropped if self.name(ino) == name), default=0)

    # Settings

    def set(self, ino: int, settings: Settings, batch: Batch) -> None:
        """Give a top-level directory, or the mount itself, settings."""
        batch.mark(keys.SETTINGS, ino, settings.to_json().encode())
        batch.then(lambda: self._changed(ino, settings))

    def wake(self) -> None:
        """Wake the tasks that wait for a change: there is a tree to walk."""
        done, self.changed = self.changed, trio.Event()
        done.set()

    def share(self, shares: Shares) -> None:
        """Set the bandwidth that namespaces share. Call again when its rate changes."""
        self.shares = shares
        self._look_around()

    def _look_around(self) -> None:
        self._settings_change()
        shared = self.shares is not None and self.shares.total.rate > 0
        self.limited = shared or any(namespace.limits.on for namespace in self)
        self.prefixes = any(namespace.settings.prefix for namespace in self)
        self.mortal = bool(self.dropped) or any(one.settings.ttl for one in self.everything())

    @property
    def slow_opens_why(self) -> str:
        """Why each open waits for the daemon's loop, for people; "" if it need not."""
        if self.access_log.on:
            return "access_log= notes each open"
        if self.shares is not None and self.shares.total.rate > 0:
            return "bandwidth= limits each open"
        slowest = next((space for space in self._all.values() if space.limits.on), None)
        if slowest is None:
            return ""
        return f"namespace {self.name(slowest.ino)} has a rate limit, which the loop keeps"

    def follow(self, bring_opens: Callable[[], None], settings_change: Callable[[], None]) -> None:
        """Call these: before policies see the noted opens, and when settings have changed."""
        self._bring_opens, self._settings_change = bring_opens, settings_change

    def read(
        self, inode: Inode, where: Tier | Bucket | OtherNodes, times: int = 1, seen: int = 1
    ) -> None:
        """Note that an object was opened to read. where: the place of its bytes.

        seen: how many of the opens policies see. The others found it open, or came together with
        those.
        """
        found = self.of(inode)
        counters = found.counters
        counters[READ[where.name]] += times
        counters["read_bytes"] += times * inode.size
        if times > seen:
            found.accesses.opened_again(times - seen)
        if found.guests is not None:
            if seen and found.guests.is_unused(inode.ino):
                self._show_guest(found, inode, where)
                seen -= 1
            for _ in range(times):
                found.guests.used(inode.ino)
        for _ in range(seen):
            self._lately.append((found, inode.key or inode.ino, inode.parent_key, inode.ino))
            if len(self._lately) == LATELY:
                self._show_noted()
        if self.access_log.on:
            self.access_log.read(inode, where.name)

    def _show_guest(
        self, space: Namespace, inode: Inode, where: Tier | Bucket | OtherNodes
    ) -> None:
        """Show policies the first open of a copy that came from another node."""
        self._show_noted()
        key, hit = inode.key or inode.ino, where.name != OtherNodes.name
        space.accesses.opened_guest(key, inode.parent_key, space.parent, hit=hit)
        self._hot.touch(inode.ino)

    def unused(self, inodes: Iterable[Inode], now: int) -> list[Inode]:
        """The inodes whose time of access is to be noted now, as relatime does.

        That is a time older than the last change, or than a minute. Where objects live for a time
        after their last use, it is less than a minute.
        """
        return [
            one
            for one in inodes
            if one.atime_ns <= one.mtime_ns or now - one.atime_ns > self.of(one).use_step
        ]

    def show_opens(self) -> None:
        """Show all opens so far to policies and to the counters of hot objects."""
        self._bring_opens()
        self._show_noted()

    def _show_noted(self) -> None:
        lately, self._lately = self._lately, []
        for space, key, parent, ino in lately:
            space.accesses.opened(key, parent, space.parent)
            self._hot.touch(ino)

    @property
    def hot(self) -> HotObjects:
        """The hot objects, by inode, with all opens so far."""
        self.show_opens()
        return self._hot

    def left(self, inode: Inode, how: str) -> None:
        """Count an object that left the local tiers: `dropped_REASON`, or `spilled`."""
        self.of(inode).counters[how] += 1

    def written(self, inode: Inode, charged: int, size: int | None) -> None:
        """Count a complete object, whose writer has waited for `charged` bytes of it.

        The other bytes are charged to the mount now. They came by a mapping, or from writers that
        closed the file together. size: bytes that its writers wrote; None: they did not change it.
        """
        self.show_opens()
        found = self.of(inode)
        if size is not None:
            found.counters["written"] += 1
            found.counters["written_bytes"] += size
        if inode.links and not self.places.lacks_key(inode):  # else its rename shows it
            found.stored(inode)
        if self.access_log.on and size is not None:
            self.access_log.written(inode)
        if self.shares is not None:
            self.shares.total.charge(max(0, inode.data - charged))

    def _changed(self, ino: int, settings: Settings) -> None:
        self.wake()
        self.places.forget_paths()  # paths begin at namespaces
        found, before = self._all.get(ino), Settings()
        if found is None:
            found = self._all[ino] = Namespace(ino, settings, tiered=self.tiered)
        else:
            before = found.settings
            found.change(settings)
        full = found.objects or ino in self.unaccounted
        if full and found.drops is None and _lowers_quota(before, settings):
            found.drops = Drops("quota")  # until `Quota.bring_within` has ended
        self._look_around()
        if settings.pool != before.pool:
            self.pool_switched(ino)

    def forget(self, ino: int, batch: Batch) -> None:
        """Forget a namespace: its directory was empty, and is removed."""
        batch.unmark(keys.SETTINGS, ino)
        batch.then(partial(self._end, self._all, ino))

    def _end(self, among: dict[int, Namespace], ino: int) -> None:
        found = among.pop(ino, None)
        if found is not None:
            found.limits.change(Settings())  # tasks that wait there may go on
        if found is not None and found.objects:  # files that are open, without a name
            self._ended[ino] = found
        self._look_around()

    def drop(self, ino: int, name: bytes, batch: Batch, *, switched: bool) -> None:
        """Drop a namespace: all below it is gone for programs at once. Its room follows later.

        name: the last name of its directory. switched: a new version of the namespace has it now.
        """
        batch.unmark(keys.SETTINGS, ino)
        value = name + keys.SWITCHED if switched else name
        batch.mark(keys.DROPPED, ino, value)
        batch.then(lambda: self._dropped(ino, value))
        if not switched and self.settings_of(ino).pool:
            self.pool_dropped(name.decode("utf-8", "surrogateescape"), batch)

    def settings_of(self, ino: int) -> Settings:
        """The settings of a top-level directory: its own, or those of the mount."""
        return self._all.get(ino, self.default).settings

    def _dropped(self, ino: int, value: bytes) -> None:
        found = self._all.pop(ino, None)
        self._names[ino] = value.removesuffix(keys.SWITCHED)
        if found is None:
            found = Namespace(ino, Settings(), tiered=self.tiered)
        found.drops = Drops("version" if value.endswith(keys.SWITCHED) else "asked")
        found.limits.change(Settings())  # tasks that wait there may go on
        self.dropped[ino] = found
        self._look_around()
        self.places.forget_paths()
        self.wake()

    def count_on(self, dropped: int, ino: int) -> None:
        """Let the counters of a namespace go on in its new version, as those of one namespace."""
        before, now = self.dropped[dropped], self._all[ino]
        now.counters = before.counters
        now.opens_timed, now.open_seconds = before.opens_timed, before.open_seconds

    def drops_of(self, ino: int) -> Drops:
        """Return what has gone of a dropped namespace by now, and why."""
        found = self.dropped[ino].drops
        assert found is not None  # each dropped namespace has one
        return found

    def end_drop(self, ino: int, batch: Batch) -> None:
        """End the drop of a directory of which nothing is left."""
        batch.unmark(keys.DROPPED, ino)
        batch.then(lambda: self._cleared(ino))

    def _cleared(self, ino: int) -> None:
        self._end(self.dropped, ino)
        self._names.pop(ino, None)

    def forget_name(self, ino: int, batch: Batch) -> None:
        """Forget the name that a dropped directory had."""
        batch.mark(keys.DROPPED, ino)
        batch.then(lambda: self._names.update({ino: b""}))

    def account_anew(self, ino: int, batch: Batch) -> None:
        """Have all inodes below a directory accounted to the directory's namespace."""
        batch.mark(keys.UNACCOUNTED, ino)
        batch.then(partial(self.unaccounted.update, [ino]))
        batch.then(self.wake)

    def end_account_anew(self, ino: int, batch: Batch) -> None:
        batch.unmark(keys.UNACCOUNTED, ino)
        batch.then(partial(self.unaccounted.__delitem__, ino))
        batch.then(self.wake)  # it may have more than its quota now

    # Accounts

    def count(self, inode: Inode, costs: Mapping[str, int], bucket: Bucket, sign: int) -> None:
        """Count a sealed object that comes (1) or goes (-1). Quotas count only resident objects.

        costs: bytes of its copies by local tier. A quota counts packed copies at their full size.
        """
        found = self.of(inode)
        if found.blocks is not None and not inode.in_pool:  # a match asks the index about those
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
        if inode.unevictable:
            lowest = list(costs)[-1]
            found.kept_bytes[lowest] += sign * costs[lowest]
            found.kept_objects += sign
        if len(costs) > 1:
            found.doubled_bytes += sign * cost
            found.doubled_objects += sign
        if self._ended and not found.objects:
            self._ended.pop(found.ino, None)
        if inode.model:
            found.models[inode.model] += sign
            found.model_bytes[inode.model] += sign * cost

    def everything(self) -> Iterator[Namespace]:
        """All namespaces, with dropped ones, and removed ones that still have open files."""
        self.show_opens()
        return chain(self._all.values(), self.dropped.values(), self._ended.values())

    def describe_models(self, spaces: Iterable[Namespace]) -> list[dict[str, Any]]:
        """The models of the blocks in some namespaces, for people; most bytes first."""
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


def _lowers_quota(before: Settings, now: Settings) -> bool:
    """Whether a hard quota is less than before, or applies to objects that kvfs kept before.

    0 is no quota.
    """
    quotas = (before.quota_hard, now.quota_hard), (before.quota_objects, now.quota_objects)
    applies = (before.eviction == "never" or before.pin) and now.eviction != "never" and not now.pin
    return any(new > 0 and (applies or new < old or not old) for old, new in quotas)

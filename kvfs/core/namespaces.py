"""Namespaces: what each was told to be, what it holds, and in which order that goes.

Contract: a top-level directory that was given a setting is a namespace, and so is the mount itself
for everything else. An inode says to which one it is accounted (`Inode.namespace`, the number of
the directory); what is made below a directory is accounted to the directory's. Settings are in the
catalog; what a namespace holds is counted from the inodes. Dropped trees are here until nothing
of them is left: whatever is accounted to one is not there any more for anybody who asks.
All methods are synchronous. Not for walking trees (`Walks`), nor for choosing victims (`Room`).
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import trio

from kvfs import eviction, layouts
from kvfs.catalog import ROOT_INO, Batch, Catalog, Inode
from kvfs.core.limits import Limits
from kvfs.core.open_order import OpenOrder
from kvfs.core.order import Order, key_of
from kvfs.errors import ConfigError
from kvfs.fairness.hot_objects import HotObjects
from kvfs.fairness.shares import Shares
from kvfs.settings import MEDIA, Settings
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

MOUNT = "."  # the name of the mount's own namespace
PATHS_REMEMBERED = 4096  # directories, about 0.5 MiB
MODELS_MAX = 10_000  # more are not told apart
SECOND = 10**9
USES_NOTED = 16  # times in a life, at least, if it is counted from the last use
SMALLEST = 16  # entries
_READ = {name: f"read_{name}" for name in MEDIA}  # by tier
COUNTERS = (*_READ.values(), "read_bytes", "written", "written_bytes")


class Namespace:
    """`ino` is its directory. Bytes are physical, each object counted once."""

    def __init__(self, ino: int, settings: Settings) -> None:
        self.ino = ino
        self.settings = settings
        self.bytes = self.objects = 0
        self.clean_bytes = self.clean_objects = 0  # in RAM, but on NVMe as well
        self.held: Counter[str] = Counter()  # bytes by tier
        self.held_objects: Counter[str] = Counter()
        self.models: Counter[int] = Counter()  # objects by number, see `Namespaces.models`
        self.model_bytes: Counter[int] = Counter()
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.spare: dict[int, int] = {}  # inode -> bytes
        self.limits = Limits(settings)
        self.opens = OpenOrder()
        entries = max(SMALLEST, settings.quota_objects)  # until something is known (`fit`)
        self.would_be = eviction.WouldBe(entries)
        self.choice = eviction.Choice(entries)  # by which objects go
        self.ram_choice = eviction.Choice(entries)  # by which they leave RAM
        self._watch()
        goes, moves = _policies(settings)
        self.ram_only = self._order(goes, self.ram_choice)
        self.ram_clean = self._order(moves, self.ram_choice)
        self.on_nvme = self._order(goes, self.choice)
        self.ram_kept = _kept()  # what only its owner unlinks, and only RAM holds
        self.nvme_kept = _kept()
        self.ram_spare = self._order(goes, self.ram_choice)  # not worth a write to NVMe

    def _watch(self) -> None:
        """Only what is followed needs to see accesses."""
        choices = (self.choice, self.ram_choice) if "adaptive" in _policies(self.settings) else ()
        self.accesses = eviction.Accesses(self.would_be, *choices)

    def _order(self, name: str, choice: eviction.Choice) -> Order:
        return Order(self._policy(name, choice), goes=name != "never")

    @staticmethod
    def _policy(name: str, choice: eviction.Choice) -> eviction.Policy:
        if name == "adaptive":
            return eviction.Following(choice, choice.capacity)
        return eviction.make(name, choice.capacity, leaf_first=True)

    @property
    def orders(self) -> tuple[Order, ...]:
        return (
            *(self.ram_only, self.ram_clean, self.ram_spare, self.on_nvme),
            *(self.ram_kept, self.nvme_kept),
        )

    def order(self, inode: Inode, tier: Tier, holders: list[Tier]) -> Order:
        """Where a copy of an object has its place."""
        if tier.slow:
            return self.nvme_kept if inode.kept else self.on_nvme
        if len(holders) > 1:
            return self.ram_clean
        if inode.kept:
            return self.ram_kept
        return self.ram_spare if inode.ino in self.spare else self.ram_only

    def refuse(self, inode: Inode) -> None:
        """What only RAM has is not worth a write to NVMe, until it is touched."""
        self.ram_only.discard(inode)
        self.spare[inode.ino] = Tier.cost(inode.blocks)
        self.ram_spare.touch(inode)

    def take_back(self, inode: Inode) -> None:
        """It is worth that after all, or leaves."""
        if self.spare and self.spare.pop(inode.ino, None) is not None:
            self.ram_spare.discard(inode)

    def see(self, inode: Inode) -> None:
        """It was opened or stored: what another capacity would have made of that is known later.

        Where a connector's name does not say what it follows, the opens of its process may.
        """
        if inode.model and not inode.parent_key and (before := self.opens.follows(key_of(inode))):
            inode.parent_key = before
            for order in self.orders:
                if inode in order:
                    order.discard(inode)
                    order.touch(inode)
        self.accesses.see(key_of(inode), inode.parent_key, self.parent)

    def describe(self) -> dict[str, Any]:
        """What it holds and what became of what was asked of it, for people; bytes and counts."""
        return {
            "settings": self.settings.to_text(),
            "bytes": self.bytes,
            "objects": self.objects,
            "tiers": {
                name: {"bytes": size, "objects": self.held_objects[name]}
                for name, size in self.held.items()
            },
            "counters": {name: count for name, count in self.counters.items() if count},
            "following": self.winner,
            "capacity_objects": self.would_be.capacity,
            "hit_ratio_at": {f"{at:g}": share for at, share in self.would_be.answers().items()},
        }

    def parent(self, key: int) -> int:
        """The key of the block before it in its prompt; 0: not known."""
        return next(filter(None, (order.parent(key) for order in self.orders)), 0)

    def fit(self, tiers: list[Tier]) -> None:
        """Tell its policies how many objects there is room for, at their mean size.

        What others have is not counted as room, but neither is what they may have to give.
        """
        most = 0
        for tier in tiers:
            bytes_, objects = self.held[tier.name], self.held_objects[tier.name]
            if not self.takes(tier) or not objects:
                continue
            room = bytes_ + max(0, tier.free)
            if self.settings.quota_hard:
                room = min(room, self.settings.quota_hard)
            entries = max(SMALLEST, room * objects // max(1, bytes_))
            if self.settings.quota_objects:
                entries = min(entries, self.settings.quota_objects)
            most = max(most, entries)
            for order in (self.on_nvme,) if tier.slow else (self.ram_only, self.ram_clean):
                order.give_room_for(entries)
            if not tier.slow:
                self.ram_choice.capacity = entries
        if most:
            self.would_be.capacity = self.choice.capacity = most
        self.would_be.follow(self.winner or "lru")
        self.accesses.fit()

    @property
    def winner(self) -> str:
        """The policy that its adaptive one follows at the moment; "" if it has another."""
        return self.choice.winner if _policies(self.settings)[0] == "adaptive" else ""

    def change(self, settings: Settings) -> None:
        before, self.settings = self.settings, settings
        self.limits.change(settings)
        if (before.eviction, before.pin) != (settings.eviction, settings.pin):
            goes, moves = _policies(settings)
            for order, name, choice in (
                (self.ram_only, goes, self.ram_choice),
                (self.ram_clean, moves, self.ram_choice),
                (self.ram_spare, goes, self.ram_choice),
                (self.on_nvme, goes, self.choice),
            ):
                order.change(self._policy(name, choice), goes=name != "never")
            self._watch()

    def members(self, inode: Inode) -> set[int]:
        """What is here of an object's group."""
        key = key_of(inode)
        return {ino for order in self.orders for ino in order.members(key)}

    def takes(self, tier: Tier) -> bool:
        """Whether its objects may be there."""
        return not self.settings.media or tier.name in self.settings.media

    def homeless(self, tiers: Iterable[Tier]) -> str:
        """Why it has no place for anything new on these tiers; "" if it has."""
        names = [tier.name for tier in tiers]
        media = self.settings.media
        if not media or set(media) & set(names):
            return ""
        return (
            f"its objects may be in media={'+'.join(media)}, and the mount has "
            f"{'+'.join(names)} only: mount with {media[0]}=, or kvfs ns set media=all"
        )

    @property
    def urgency(self) -> tuple[bool, float]:
        """Who has most beyond what is his gives first: by soft quota, then by share."""
        soft = self.settings.quota_soft
        return 0 < soft < self.bytes, self.bytes / self.settings.weight

    def expired(self, inode: Inode) -> bool:
        """Whether its time to live is over."""
        return self.life(inode, 1.0) <= 0

    def life(self, inode: Inode, most: float) -> float:
        """Seconds until its time is over, `most` of them if it lives longer, or for ever."""
        ttl = self.settings.ttl
        if not ttl or not inode.is_file:
            return most
        if not inode.sealed:  # its time has not begun
            return min(most, ttl)
        at = inode.mtime_ns if self.settings.ttl_from == "write" else inode.atime_ns
        return min(most, ttl - (time.time_ns() - at) / SECOND)

    def use_step(self, most: int) -> int:
        """How old (ns) a time of use may be before it is noted anew: no more than `most`."""
        settings = self.settings
        if not settings.ttl or settings.ttl_from != "use":
            return most
        return min(most, settings.ttl * SECOND // USES_NOTED)


def _policies(settings: Settings) -> tuple[str, str]:
    """By which objects go, and by which their copies in RAM do."""
    if settings.pin:
        return "never", "never"
    goes = settings.eviction
    return goes, "lru" if goes in {"never", "ttl"} else goes


def _kept() -> Order:
    return Order(eviction.make("never", 1), goes=False)


class Namespaces:
    """All of a mount. `default` is the mount's own."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.default = Namespace(ROOT_INO, Settings())
        self._all: dict[int, Namespace] = {ROOT_INO: self.default}
        self.dropped: dict[int, Namespace] = {}  # by top-level directory
        self._names: dict[int, bytes] = {}  # that those had
        self._ended: dict[int, Namespace] = {}  # what is open still, of those that are no more
        # Directories to be walked, oldest first, and how often that was asked for.
        self.unaccounted: Counter[int] = Counter()
        self.models: dict[int, tuple[str, str]] = {}  # number -> engine, model
        self._numbers: dict[tuple[str, str], int] = {}
        self.shares: Shares | None = None  # of what the mount may read in a second, when served
        self.hot = HotObjects()  # by inode
        self.limited = False  # whether anybody may have to wait at an open
        self.changed = trio.Event()  # something to walk, or other settings
        self._paths: OrderedDict[int, layouts.Directory] = OrderedDict()
        for ino, text in catalog.marks(b"n"):
            self._load(ino, text)
        for ino, name in catalog.marks(b"r"):
            self._dropped(ino, name)
        self.unaccounted.update(ino for ino, _ in catalog.marks(b"t"))
        for number, value in catalog.marks(b"l"):
            engine, _, model = value.decode("utf-8", "surrogateescape").partition("\0")
            self._know(number, engine, model)
        self._look_for_limits()

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
            self._all[ino] = Namespace(ino, settings)

    def __iter__(self) -> Iterator[Namespace]:
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

    def last_dropped(self, name: str) -> int:
        """The last directory of a name that was dropped and is not all gone; 0: there is none."""
        return max((ino for ino in self.dropped if self.name(ino) == name), default=0)

    # Settings

    def set(self, ino: int, settings: Settings, batch: Batch) -> None:
        """Give a top-level directory, or the mount itself, settings."""
        batch.mark(b"n", ino, settings.to_json().encode())
        batch.then(lambda: self._changed(ino, settings))

    def _wake(self) -> None:
        done, self.changed = self.changed, trio.Event()
        done.set()

    def share(self, shares: Shares) -> None:
        """Of what namespaces compete for their parts from now on; call again when its rate is."""
        self.shares = shares
        self._look_for_limits()

    def _look_for_limits(self) -> None:
        shared = self.shares is not None and self.shares.total.rate > 0
        self.limited = shared or any(namespace.limits.on for namespace in self)

    def read(self, inode: Inode, tier: Tier) -> None:
        """An object was opened to read."""
        found = self.of(inode)
        counters = found.counters
        counters[_READ[tier.name]] += 1
        counters["read_bytes"] += inode.size
        found.accesses.see(inode.key or inode.ino, inode.parent_key, found.parent)
        self.hot.touch(inode.ino)

    def written(self, inode: Inode) -> None:
        """An object is complete: it is charged now."""
        found = self.of(inode)
        found.counters["written"] += 1
        found.counters["written_bytes"] += inode.size
        found.see(inode)
        if self.shares is not None:
            self.shares.total.charge(inode.size)

    def _changed(self, ino: int, settings: Settings) -> None:
        self._wake()
        self._paths.clear()  # they begin at namespaces
        found = self._all.get(ino)
        if found is None:
            self._all[ino] = Namespace(ino, settings)
        else:
            found.change(settings)
        self._look_for_limits()

    def forget(self, ino: int, batch: Batch) -> None:
        """Its directory is removed, and was empty."""
        batch.unmark(b"n", ino)
        batch.then(partial(self._end, self._all, ino))

    def _end(self, among: dict[int, Namespace], ino: int) -> None:
        found = among.pop(ino, None)
        if found is not None:
            found.limits.change(Settings())  # who waits there may go
        if found is not None and found.objects:  # open, without a name
            self._ended[ino] = found
        self._look_for_limits()

    def drop(self, ino: int, name: bytes, batch: Batch) -> None:
        """All below this directory, which had that name, is gone from now on; its space follows."""
        batch.unmark(b"n", ino)
        batch.mark(b"r", ino, name)
        batch.then(lambda: self._dropped(ino, name))

    def _dropped(self, ino: int, name: bytes) -> None:
        found = self._all.pop(ino, None)
        self._names[ino] = name
        self.dropped[ino] = Namespace(ino, Settings()) if found is None else found
        self.dropped[ino].limits.change(Settings())  # who waits there may go
        self._look_for_limits()
        self._paths.clear()
        self._wake()

    def end_drop(self, ino: int, batch: Batch) -> None:
        """Nothing of it is left."""
        batch.unmark(b"r", ino)
        batch.then(lambda: self._cleared(ino))

    def forget_name(self, ino: int, batch: Batch) -> None:
        """The one that a dropped directory had."""
        batch.mark(b"r", ino)
        batch.then(lambda: self._names.update({ino: b""}))

    def _cleared(self, ino: int) -> None:
        self._end(self.dropped, ino)
        self._names.pop(ino, None)

    def account_anew(self, ino: int, batch: Batch) -> None:
        """All below this directory is to be accounted as it is itself."""
        batch.mark(b"t", ino)
        batch.then(partial(self.unaccounted.update, [ino]))
        batch.then(self._wake)

    def end_account_anew(self, ino: int, batch: Batch) -> None:
        batch.unmark(b"t", ino)
        batch.then(partial(self.unaccounted.__delitem__, ino))
        batch.then(self._wake)  # it may have more than its quota now

    # Places

    def place(self, inode: Inode, directory: Inode, name: bytes, batch: Batch) -> None:
        """Account an inode to its directory's namespace, and read what its name says."""
        inode.namespace = directory.namespace
        if not inode.is_file:
            self._paths.pop(inode.ino, None)
            return
        block = layouts.recognise(self._path(directory), name)
        if block is None:
            inode.key, inode.parent_key = layouts.key_of(directory.ino, name), 0
            inode.model, inode.kept = 0, False
            return
        # One that waits for its rename is the block already: to policies and ghosts it is one use.
        inode.key = block.key
        inode.parent_key = (
            block.parent_key
            or self._linked_parent(directory, block)
            or self.of(inode).opens.follows(inode.key)
        )
        inode.model = self._number(block.engine, block.model, batch)
        default = self.of(inode).settings.eviction == Settings().eviction
        droppable = block.temporary or layouts.LIVES[block.layout].droppable
        inode.kept = default and not droppable

    def _linked_parent(self, directory: Inode, block: layouts.Block) -> int:
        """VUA says the block before by a symbolic link beside the files."""
        if block.engine != "vua":
            return 0
        entry = self.catalog.lookup(directory.ino, b"parent")
        inode = None if entry is None else self.catalog.inode(entry.ino)
        if inode is None or not inode.target:
            return 0
        keys = layouts.link(self._path(directory), b"parent", inode.target)
        return 0 if keys is None else keys[1]

    def _path(self, directory: Inode) -> layouts.Directory:
        """Names from the namespace's directory down to this one."""
        ino = directory.ino
        found = self._paths.get(ino)
        if found is None:
            found = self._find_path(directory)
            self._paths[ino] = found
            if len(self._paths) > PATHS_REMEMBERED:
                self._paths.popitem(last=False)
        return found

    def _find_path(self, directory: Inode) -> layouts.Directory:
        names: list[bytes] = []
        current: Inode | None = directory
        while current is not None and current.ino not in (ROOT_INO, directory.namespace):
            if not current.links:
                break
            parent, cookie = current.links[0]
            entry = self.catalog.dentry(parent, cookie)
            if entry is None:
                break
            names.append(entry.name)
            current = self.catalog.inode(parent)
        return tuple(reversed(names))

    def paths_changed(self) -> None:
        """A directory got another name: nothing is remembered."""
        self._paths.clear()

    def _number(self, engine: str, model: str, batch: Batch) -> int:
        known = self._numbers.get((engine, model))
        if known is not None:
            return known
        number = max(self.models, default=0) + 1
        if number > MODELS_MAX:
            return 0
        value = f"{engine}\0{model}".encode("utf-8", "surrogateescape")
        batch.mark(b"l", number, value)
        batch.then(lambda: self._know(number, engine, model))
        return number

    def _know(self, number: int, engine: str, model: str) -> None:
        self.models[number] = engine, model
        self._numbers[engine, model] = number

    # Accounts

    def count(self, inode: Inode, holders: list[Tier], sign: int) -> None:
        """A sealed object comes (1) or goes (-1)."""
        found = self.of(inode)
        cost = Tier.cost(inode.blocks)
        found.bytes += sign * cost
        found.objects += sign
        for tier in holders:
            found.held[tier.name] += sign * cost
            found.held_objects[tier.name] += sign
        if len(holders) > 1:
            found.clean_bytes += sign * cost
            found.clean_objects += sign
        if self._ended and not found.objects:
            self._ended.pop(found.ino, None)
        if inode.model:
            found.models[inode.model] += sign
            found.model_bytes[inode.model] += sign * cost

    def everything(self) -> Iterator[Namespace]:
        """All, also those that were dropped, and those of which only open files are left."""
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
            for engine, model in [self.models[number]]
        ]

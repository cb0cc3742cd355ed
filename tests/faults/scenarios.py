"""Actions of a program or of the background, and the states that a death in between may leave."""

import os
import random
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from kvfs import prefix
from kvfs.catalog import ROOT_INO, Inode
from kvfs.compression.files import decompress
from kvfs.core.bucket.upload import deletion
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.moves import transfers
from kvfs.core.names.renames import RENAME_EXCHANGE
from kvfs.s3.facts import Facts
from tests.s3.folder import FolderStore
from tests.unit.world import MIB, World

_dice = random.Random(1)
OLD, NEW, KEPT = (_dice.randbytes(size) for size in (20_000, 30_000, 10_000))
TAIL = _dice.randbytes(7_000)
NUMBERS = b"".join(bytes([byte, 0x3F]) for byte in _dice.randbytes(10_000))  # of 2 bytes each

# Contents by path; of a directory, whose path ends with a slash, there is none. An extended
# attribute is PATH@NAME.
State = dict[bytes, bytes]
Step = Callable[[World], Awaitable[None]]


class Scenario(NamedTuple):
    """`outcomes` may be found after a death: the first before it, the last after all steps.

    `ends`: the tiers that hold `a` at the end. `damaged`: a copy is spoilt on purpose. `bucket`:
    there is a bucket.
    """

    prepare: Step
    act: Step
    outcomes: list[State]
    ends: tuple[str, ...] | None = None
    damaged: bool = False
    bucket: bool = False


def world_of(storage: Path, scenario: Scenario) -> World:
    """The world of a scenario, in which small objects stand for large ones."""
    transfers.PACKED_LEAST = len(NUMBERS)
    return World(storage, store=FolderStore(storage / "bucket") if scenario.bucket else None)


@asynccontextmanager
async def opened(
    made: World, name: bytes, *, writable: bool = False, truncate: bool = False
) -> AsyncIterator[OpenObject]:
    held = await made.objects.open(made.find(name).ino, writable=writable, truncate=truncate)
    try:
        yield held
    finally:
        await made.close(held, writable=writable)


# How it begins


async def nothing(made: World) -> None:
    made.expect(b"a", None)


async def nothing_in_ram(made: World) -> None:
    made.expect(b"a", MIB)


async def in_ram(made: World) -> None:
    await made.store(b"a", OLD, made.ram)


async def on_nvme(made: World) -> None:
    await made.store(b"a", OLD, made.nvme)
    made.expect(b"a", None)  # its next version begins there, too


async def in_both(made: World) -> None:
    inode = await made.store(b"a", OLD, made.ram)
    await made.demote(inode.ino)
    assert made.ledger.tiers.holders(made.tree.inode(inode.ino)) == made.tiers


async def numbers_in_ram(made: World) -> None:
    made.tell(".", compression="nvme", media="all")
    await made.store(b"a", NUMBERS, made.ram)


async def packed_in_both(made: World) -> None:
    await numbers_in_ram(made)
    await demote(made)
    assert made.find(b"a").packed is not None


async def packed(made: World) -> None:
    await packed_in_both(made)
    made.ledger.records.remove_copy(made.find(b"a"), made.fast)


async def packed_without_ram(made: World) -> None:
    await packed(made)
    made.tell(".", media="nvme")


def also(name: bytes, content: bytes, before: Step = in_both) -> Step:
    async def prepare(made: World) -> None:
        await before(made)
        await made.store(name, content, made.ram)

    return prepare


async def linked(made: World) -> None:
    await in_both(made)
    made.tree.link(made.find(b"a").ino, ROOT_INO, b"b")


async def directories(made: World) -> None:
    made.expect(b"a", MIB)
    parent = make_directory(made, b"d").ino
    await made.objects.sealing.close(await made.create(b"f", OLD, parent), writable=True)


async def empty_directory(made: World) -> None:
    make_directory(made, b"d")


async def attributed(made: World) -> None:
    await in_ram(made)
    made.attributes.set_xattr(made.find(b"a").ino, b"user.x", b"1")


def make_directory(made: World, name: bytes) -> Inode:
    return made.tree.make(ROOT_INO, name, stat.S_IFDIR | 0o755, 0, 0)


# What happens


async def create(made: World) -> None:
    held = await made.create(b"a", NEW)
    await made.close(held, writable=True)


async def rewrite(made: World) -> None:
    async with opened(made, b"a", writable=True, truncate=True) as held:
        made.write(held, NEW)


async def rewrite_while_read(made: World) -> None:
    async with opened(made, b"a"), opened(made, b"a", writable=True, truncate=True) as held:
        made.write(held, NEW)


async def rewrite_in_place(made: World) -> None:
    async with opened(made, b"a", writable=True) as held:
        made.write(held, NEW)


async def append(made: World) -> None:
    async with opened(made, b"a", writable=True) as held:
        made.write(held, TAIL, len(OLD))


def truncate(size: int) -> Step:
    async def act(made: World) -> None:
        await made.objects.truncate(made.find(b"a").ino, size)

    return act


def rename(name: bytes, name2: bytes, flags: int = 0) -> Step:
    async def act(made: World) -> None:
        made.renames.rename(ROOT_INO, name, ROOT_INO, name2, flags)
        await forget_all(made)

    return act


async def rename_over_open(made: World) -> None:
    async with opened(made, b"b") as held:
        made.renames.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        assert made.content(held) == KEPT


async def link(made: World) -> None:
    made.tree.link(made.find(b"a").ino, ROOT_INO, b"b")


async def unlink(made: World) -> None:
    made.tree.unlink(ROOT_INO, b"a")
    await forget_all(made)


async def unlink_open(made: World) -> None:
    async with opened(made, b"a") as held:
        made.tree.unlink(ROOT_INO, b"a")
        assert made.content(held) == OLD


async def write_unlinked(made: World) -> None:
    async with opened(made, b"a") as held:
        made.tree.unlink(ROOT_INO, b"a")
        again = await made.objects.open(held.inode.ino, writable=True)
        try:
            made.write(again, NEW)
        finally:
            await made.close(again, writable=True)
        assert made.content(held) == NEW


async def unlink_written(made: World) -> None:
    async with opened(made, b"a", writable=True) as held:
        made.tree.unlink(ROOT_INO, b"a")
        made.write(held, NEW)


async def demote(made: World) -> None:
    await made.demote(made.find(b"a").ino)


async def demote_many(made: World) -> None:
    await made.dispatcher.trash.empty()
    inos = [made.find(name).ino for name in (b"a", b"b")]
    made.dispatcher._jobs.update(inos)
    made.dispatcher._running += 1
    await made.dispatcher._job(made.dispatcher.demotion, inos)


async def promote(made: World) -> None:
    await made.promote(made.find(b"a").ino)


async def settle(made: World) -> None:
    await made.settle(made.find(b"a").ino)
    assert made.ledger.counters["settled"] or made.ledger.counters["job_failures"]


async def uncopy_ram(made: World) -> None:
    """Use up RAM, with a file of its own size."""
    make_room(made, 0)
    await made.dispatcher.trash.empty()


async def uncopy_nvme(made: World) -> None:
    make_room(made, 1)
    await made.dispatcher.trash.empty()


def make_room(made: World, number: int) -> None:
    tier = made.tiers[number]
    spare = made.room.headroom if tier is made.ram else 0
    wanted = tier.capacity - tier.reserved - spare
    assert made.room.reserve(tier, wanted)
    tier.reserved -= wanted


async def evict(made: World) -> None:
    made.ledger.removals.drop(made.find(b"a"), "evicted")
    await made.dispatcher.trash.empty()


async def read_packed(made: World) -> None:
    assert await made.read(made.find(b"a").ino) == NUMBERS


async def append_to_packed(made: World) -> None:
    async with opened(made, b"a", writable=True) as held:
        made.write(held, TAIL, len(NUMBERS))


async def mkdir(made: World) -> None:
    make_directory(made, b"d")


async def rmdir(made: World) -> None:
    made.tree.rmdir(ROOT_INO, b"d")


async def set_xattr(made: World) -> None:
    made.attributes.set_xattr(made.find(b"a").ino, b"user.x", b"2")


async def remove_xattr(made: World) -> None:
    made.attributes.remove_xattr(made.find(b"a").ino, b"user.x")


async def spoil(made: World) -> None:
    """Write to the copy in RAM without kvfs; the next reader gets the other copy."""
    inode = made.find(b"a")
    if made.ram in made.ledger.tiers.holders(inode):
        os.truncate(made.fast.path(inode.ino, inode.version), 5)
    assert await made.read(inode.ino) == OLD


async def forget_all(made: World) -> None:
    """Let the kernel forget inodes without a name, and empty the trash."""
    for ino in list(made.ledger.orphans.rooms):
        made.ledger.removals.purge(ino)
    await made.dispatcher.trash.empty()


# Namespaces


def namespace(**settings: str) -> Step:
    """Make `n` with a file, and a directory with two names of another file."""

    async def prepare(made: World) -> None:
        made.namespace("n", **settings)
        made.mkdir(b"n/d")
        inode = await made.make_file(b"n/d/f", OLD)
        made.tree.link(inode.ino, made.find(b"n").ino, b"g")
        await made.make_file(b"n/h", KEPT)

    return prepare


async def make_namespace(made: World) -> None:
    made.namespace("n", pin="on")


async def plain_directory(made: World) -> None:
    made.mkdir(b"n")
    await made.make_file(b"n/f", OLD)


async def begin_namespace(made: World) -> None:
    made.tell("n", pin="on")
    await walk(made)


async def tell(made: World) -> None:
    made.tell("n", quota_hard="1M", eviction="lru")
    await walk(made)


async def switch(made: World) -> None:
    made.tell("n", version="2")
    await walk(made)


async def drop(made: World) -> None:
    made.drop("n")
    await walk(made)


async def drop_open(made: World) -> None:
    held = await made.objects.open(made.at(b"n/d/f").ino, writable=False)
    try:
        made.drop("n")
        await walk(made)
        assert made.content(held) == OLD
    finally:
        await made.close(held, writable=False)


async def walk(made: World) -> None:
    """Run the background's work in this task: its errors are the caller's."""
    namespaces = made.ledger.namespaces
    for ino in list(namespaces.dropped):
        await made.walks._clear(ino)
    for ino in list(namespaces.unaccounted):
        await made.walks._account_anew(ino)
    await made.dispatcher.trash.empty()


async def two_namespaces(made: World) -> None:
    for name in ("m", "n"):
        made.namespace(name, weight="7")
    made.mkdir(b"n/d")
    for path in (b"n/d/f", b"n/d/g"):
        await made.make_file(path, OLD)


async def move_directory(made: World) -> None:
    made.renames.rename(made.find(b"n").ino, b"d", made.find(b"m").ino, b"e", 0)
    await walk(made)
    assert made.ledger.namespaces.of(made.find(b"m")).objects == 2


async def move_file(made: World) -> None:
    made.renames.rename(made.at(b"n/d").ino, b"f", made.find(b"m").ino, b"f", 0)


async def hidden(made: World) -> None:
    made.namespace("n", publish="close")


async def publish(made: World) -> None:
    await made.make_file(b"n/f", NEW)


async def publish_empty(made: World) -> None:
    await made.make_file(b"n/f", b"")


async def outrun(made: World) -> None:
    parent = made.find(b"n").ino
    one = await made.create(b"f", NEW, parent)
    try:
        await made.make_file(b"n/f", OLD)
    finally:
        await made.close(one, writable=True)


async def expired(made: World) -> None:
    made.namespace("n", ttl="1h")
    inode = await made.make_file(b"n/f", OLD)
    made.attributes.change(inode.ino, mtime_ns=1)


async def expire(made: World) -> None:
    await made.walks._expire()
    await made.dispatcher.trash.empty()


async def trim(made: World) -> None:
    space = made.tell("n", quota_objects="1", eviction="fifo")
    await walk(made)
    made.quota.keep(space, 0)
    await made.dispatcher.trash.empty()


ROOT = prefix.root_key("a fingerprint")
KEYS = prefix.block_keys(ROOT, range(5), 1)


def _block(at: int) -> bytes:
    return b"n/" + prefix.path(KEYS[at - 1] if at else ROOT, KEYS[at]).encode()


async def prefixes(made: World) -> None:
    made.namespace("n", prefix="on")
    made.mkdir(b"n/" + ROOT.hex().encode())
    for at in range(4):
        await made.make_file(_block(at), OLD)


async def continue_prefix(made: World) -> None:
    unfinished = _block(4) + b".0.tmp"
    await made.make_file(unfinished, NEW)
    above, _, name = _block(4).rpartition(b"/")
    parent = made.at(above).ino
    made.renames.rename(parent, name + b".0.tmp", parent, name, 0)


async def cut_prefix(made: World) -> None:
    above, _, name = _block(1).rpartition(b"/")
    made.tree.unlink(made.at(above).ino, name)
    for ino in list(made.ledger.prefixes.going):
        await made.walks._empty(ino, prefix=True)
    while made.ledger.prefixes.going:  # what went with it
        await made.walks._empty(min(made.ledger.prefixes.going), prefix=True)
    await made.dispatcher.trash.empty()


async def trim_prefix(made: World) -> None:
    made.quota.keep(made.tell("n", quota_objects="3"), 0)
    await made.dispatcher.trash.empty()


def prefix_of(blocks: int, **settings: bytes) -> State:
    """This many blocks, with their directories."""
    names = [ROOT, *KEYS[:blocks]]
    directories = {b"n/" + key.hex().encode() + b"/": b"" for key in names}
    files = {_block(at): OLD if at < 4 else NEW for at in range(blocks)}
    return {**told(b"n", prefix=b"on", **settings), **directories, **files}


def told(name: bytes, **settings: bytes) -> State:
    """A namespace with its settings."""
    attributes = {b"/@user.kvfs." + field.encode(): text for field, text in settings.items()}
    return {name + key: text for key, text in {b"/": b"", **attributes}.items()}


INSIDE: State = {b"n/d/": b"", b"n/d/f": OLD, b"n/g": OLD, b"n/h": KEPT}
PINNED = {**told(b"n", pin=b"on"), **INSIDE}
BOTH: State = {**told(b"m", weight=b"7"), **told(b"n", weight=b"7")}

A_OLD: State = {b"a": OLD}
A_NUMBERS: State = {b"a": NUMBERS}
TWO: State = {b"a": OLD, b"b": KEPT}
REWRITTEN: list[State] = [A_OLD, {}, {b"a": NEW}]
IN_PLACE: list[State] = [A_OLD, {}, {b"a": NEW}]
GONE: list[State] = [A_OLD, {}]

SCENARIOS = {
    "create in RAM": Scenario(nothing_in_ram, create, [{}, {b"a": NEW}]),
    "create on NVMe": Scenario(nothing, create, [{}, {b"a": NEW}]),
    "rewrite in RAM": Scenario(in_ram, rewrite, REWRITTEN),
    "rewrite on NVMe": Scenario(on_nvme, rewrite, REWRITTEN),
    "rewrite in both": Scenario(in_both, rewrite, REWRITTEN),
    "rewrite while read": Scenario(in_both, rewrite_while_read, REWRITTEN),
    "in place in RAM": Scenario(in_ram, rewrite_in_place, IN_PLACE),
    "in place on NVMe": Scenario(on_nvme, rewrite_in_place, IN_PLACE),
    "in place in both": Scenario(in_both, rewrite_in_place, IN_PLACE),
    "append in both": Scenario(in_both, append, [A_OLD, {}, {b"a": OLD + TAIL}]),
    "shorten": Scenario(in_both, truncate(100), [A_OLD, {}, {b"a": OLD[:100]}]),
    "empty": Scenario(in_both, truncate(0), [A_OLD, {}, {b"a": b""}]),
    "lengthen": Scenario(on_nvme, truncate(25_000), [A_OLD, {}, {b"a": OLD + bytes(5000)}]),
    "rename": Scenario(in_both, rename(b"a", b"b"), [A_OLD, {b"b": OLD}]),
    "rename over": Scenario(also(b"b", KEPT), rename(b"a", b"b"), [TWO, {b"b": OLD}]),
    "rename over open": Scenario(also(b"b", KEPT), rename_over_open, [TWO, {b"b": OLD}]),
    "rename directory": Scenario(
        directories, rename(b"d", b"e"), [{b"d/": b"", b"d/f": OLD}, {b"e/": b"", b"e/f": OLD}]
    ),
    "exchange": Scenario(
        also(b"b", KEPT), rename(b"a", b"b", RENAME_EXCHANGE), [TWO, {b"a": KEPT, b"b": OLD}]
    ),
    "link": Scenario(in_ram, link, [A_OLD, {b"a": OLD, b"b": OLD}]),
    "unlink in RAM": Scenario(in_ram, unlink, GONE),
    "unlink in both": Scenario(in_both, unlink, GONE),
    "unlink of two names": Scenario(linked, unlink, [{b"a": OLD, b"b": OLD}, {b"b": OLD}]),
    "unlink open": Scenario(in_both, unlink_open, GONE),
    "unlink written": Scenario(in_both, unlink_written, GONE),
    "write unlinked": Scenario(in_both, write_unlinked, GONE),
    "demote": Scenario(in_ram, demote, [A_OLD], ("ram", "nvme")),
    "demote many": Scenario(also(b"b", KEPT, in_ram), demote_many, [TWO], ("ram", "nvme")),
    "promote": Scenario(on_nvme, promote, [A_OLD], ("ram", "nvme")),
    "demote packed": Scenario(numbers_in_ram, demote, [A_NUMBERS], ("ram", "nvme")),
    "read packed": Scenario(packed, read_packed, [A_NUMBERS], ("ram", "nvme")),
    "read packed without RAM": Scenario(packed_without_ram, read_packed, [A_NUMBERS], ("nvme",)),
    "promote packed": Scenario(packed, promote, [A_NUMBERS], ("ram", "nvme")),
    "rewrite packed": Scenario(packed, rewrite, [A_NUMBERS, {}, {b"a": NEW}]),
    "append to packed": Scenario(packed, append_to_packed, [A_NUMBERS, {}, {b"a": NUMBERS + TAIL}]),
    "append to packed in both": Scenario(
        packed_in_both, append_to_packed, [A_NUMBERS, {}, {b"a": NUMBERS + TAIL}]
    ),
    "unlink packed": Scenario(packed, unlink, [A_NUMBERS, {}]),
    "unlink packed in both": Scenario(packed_in_both, unlink, [A_NUMBERS, {}]),
    "evict the packed copy": Scenario(packed_in_both, uncopy_nvme, [A_NUMBERS], ("ram",)),
    "settle": Scenario(on_nvme, settle, [A_OLD], ("nvme",)),
    "evict": Scenario(also(b"b", KEPT), evict, [TWO, {b"b": KEPT}]),
    "evict the copy in RAM": Scenario(in_both, uncopy_ram, [A_OLD], ("nvme",)),
    "evict the copy on NVMe": Scenario(in_both, uncopy_nvme, [A_OLD], ("ram",)),
    "evict from NVMe": Scenario(on_nvme, uncopy_nvme, GONE),
    "mkdir": Scenario(nothing, mkdir, [{}, {b"d/": b""}]),
    "rmdir": Scenario(empty_directory, rmdir, [{b"d/": b""}, {}]),
    "set attribute": Scenario(
        attributed,
        set_xattr,
        [{b"a": OLD, b"a@user.x": b"1"}, {b"a": OLD, b"a@user.x": b"2"}],
    ),
    "remove attribute": Scenario(attributed, remove_xattr, [{b"a": OLD, b"a@user.x": b"1"}, A_OLD]),
    "make a namespace": Scenario(nothing, make_namespace, [{}, told(b"n", pin=b"on")]),
    "make one of a directory": Scenario(
        plain_directory,
        begin_namespace,
        [{b"n/": b"", b"n/f": OLD}, {**told(b"n", pin=b"on"), b"n/f": OLD}],
    ),
    "tell a namespace": Scenario(
        namespace(pin="on"),
        tell,
        [PINNED, {**told(b"n", pin=b"on", quota_hard=b"1M", eviction=b"lru"), **INSIDE}],
    ),
    "switch a namespace": Scenario(
        namespace(pin="on"), switch, [PINNED, told(b"n", pin=b"on", version=b"2")]
    ),
    "drop a namespace": Scenario(namespace(pin="on"), drop, [PINNED, {}]),
    "drop what is open": Scenario(namespace(pin="on"), drop_open, [PINNED, {}]),
    "continue a prefix": Scenario(
        prefixes,
        continue_prefix,
        [prefix_of(4), {**prefix_of(4), _block(4) + b".0.tmp": NEW}, prefix_of(5)],
    ),
    "cut a prefix": Scenario(prefixes, cut_prefix, [prefix_of(4), prefix_of(1)]),
    "drop the end of a prefix": Scenario(
        prefixes,
        trim_prefix,
        [prefix_of(4), prefix_of(4, quota_objects=b"3"), prefix_of(3, quota_objects=b"3")],
    ),
    "drop a directory": Scenario(plain_directory, drop, [{b"n/": b"", b"n/f": OLD}, {}]),
    "move between namespaces": Scenario(
        two_namespaces,
        move_file,
        [
            {**BOTH, b"n/d/": b"", b"n/d/f": OLD, b"n/d/g": OLD},
            {**BOTH, b"n/d/": b"", b"m/f": OLD, b"n/d/g": OLD},
        ],
    ),
    "move a directory between namespaces": Scenario(
        two_namespaces,
        move_directory,
        [
            {**BOTH, b"n/d/": b"", b"n/d/f": OLD, b"n/d/g": OLD},
            {**BOTH, b"m/e/": b"", b"m/e/f": OLD, b"m/e/g": OLD},
        ],
    ),
    "publish": Scenario(
        hidden,
        publish,
        [told(b"n", publish=b"close"), {**told(b"n", publish=b"close"), b"n/f": NEW}],
    ),
    "publish an empty file": Scenario(
        hidden,
        publish_empty,
        [told(b"n", publish=b"close"), {**told(b"n", publish=b"close"), b"n/f": b""}],
    ),
    "publish too late": Scenario(
        hidden,
        outrun,
        [
            told(b"n", publish=b"close"),
            {**told(b"n", publish=b"close"), b"n/f": NEW},  # the other one was refused
            {**told(b"n", publish=b"close"), b"n/f": OLD},
        ],
    ),
    "expire": Scenario(expired, expire, [told(b"n", ttl=b"1h")]),
    "trim to a quota": Scenario(
        namespace(),
        trim,
        [
            {**told(b"n"), **INSIDE},
            {**told(b"n", quota_objects=b"1", eviction=b"fifo"), **INSIDE},
            {**told(b"n", quota_objects=b"1", eviction=b"fifo"), b"n/d/": b"", b"n/h": KEPT},
        ],
    ),
    "spoilt copy": Scenario(in_both, spoil, [A_OLD], ("nvme",), damaged=True),
}


# With a bucket

deletion.LOOK = 0.01  # s that a batch is tried again after, which the catalog has refused


async def work_off(made: World) -> None:
    """Do all work that waits for the bucket, once."""
    dispatcher = made.dispatcher.uploader
    assert dispatcher is not None
    await dispatcher.dirty.load()
    for ino in list(dispatcher.dirty):
        if ino in dispatcher.dirty:
            await made.upload(ino)
    if dispatcher.dirty.superseded.deletes:
        await dispatcher.deletion.delete_some()


def uploaded(before: Step) -> Step:
    async def prepare(made: World) -> None:
        await before(made)
        await made.upload_all()

    return prepare


async def only_there(made: World) -> None:
    await uploaded(in_both)(made)
    await leave(made)
    await made.dispatcher.trash.empty()


async def leave(made: World) -> None:
    made.ledger.removals.evict(made.find(b"a"))
    await made.dispatcher.trash.empty()


async def read(made: World) -> None:
    assert await made.read(made.find(b"a").ino) == OLD


def and_work_off(act: Step) -> Step:
    async def both(made: World) -> None:
        await act(made)
        await work_off(made)

    return both


async def change_mode(made: World) -> None:
    made.attributes.change(made.find(b"a").ino, mode=0o600)


async def move_and_work_off(made: World) -> None:
    await rename(b"d", b"e")(made)
    for ino in list(made.ledger.namespaces.unaccounted):
        await made.walks._account_anew(ino)
    await work_off(made)


def contents(made: World) -> State:
    """The files that other nodes would find in the bucket."""
    assert isinstance(made.bucket_store, FolderStore)
    return {
        key.removeprefix("p/@0/").encode(): _plain(Facts.of_head(key, store.head(key)), one.data)
        for store in [made.bucket_store]
        for key, one in store.objects.items()
    }


def _plain(facts: Facts, data: bytes) -> bytes:
    """An object's bytes as its readers see them."""
    if facts.codec == "none":
        return data
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as plain:
        source.write(data)
        source.flush()
        decompress(facts.codec, source.fileno(), plain.fileno(), facts.size, facts.stored_size)
        return plain.read()


def modes(made: World) -> dict[bytes, int]:
    """The modes in the bucket's metadata."""
    assert made.bucket_store is not None
    store = made.bucket_store
    return {
        name: Facts.of_head(key, store.head(key)).mode
        for name in contents(made)
        for key in [f"p/@0/{name.decode()}"]
    }


SCENARIOS |= {
    name: scenario._replace(bucket=True)
    for name, scenario in {
        "upload": Scenario(in_both, work_off, [A_OLD], ("ram", "nvme")),
        "upload packed": Scenario(packed, work_off, [A_NUMBERS], ("ram", "nvme")),
        "read packed and upload": Scenario(
            packed, and_work_off(read_packed), [A_NUMBERS], ("ram", "nvme")
        ),
        "upload a new version": Scenario(uploaded(in_ram), and_work_off(rewrite), REWRITTEN),
        "rename in the bucket": Scenario(
            uploaded(in_ram), and_work_off(rename(b"a", b"b")), [A_OLD, {b"b": OLD}]
        ),
        "rename over in the bucket": Scenario(
            uploaded(also(b"b", KEPT)), and_work_off(rename(b"a", b"b")), [TWO, {b"b": OLD}]
        ),
        "exchange in the bucket": Scenario(
            uploaded(also(b"b", KEPT)),
            and_work_off(rename(b"a", b"b", RENAME_EXCHANGE)),
            [TWO, {b"a": KEPT, b"b": OLD}],
        ),
        "rename a directory in the bucket": Scenario(
            uploaded(directories),
            move_and_work_off,
            [{b"d/": b"", b"d/f": OLD}, {b"e/": b"", b"e/f": OLD}],
        ),
        "unlink in the bucket": Scenario(uploaded(in_both), and_work_off(unlink), GONE),
        "change a mode in the bucket": Scenario(
            uploaded(in_ram), and_work_off(change_mode), [A_OLD], ("ram",)
        ),
        "change a mode of what is only there": Scenario(
            only_there, and_work_off(change_mode), [A_OLD]
        ),
        "leave for the bucket": Scenario(uploaded(in_both), leave, [A_OLD]),
        "come back from the bucket": Scenario(only_there, read, [A_OLD], ("ram",)),
        "rewrite what is only there": Scenario(only_there, and_work_off(rewrite), REWRITTEN),
        "unlink what is only there": Scenario(only_there, and_work_off(unlink), GONE),
        "rename what is only there": Scenario(
            only_there, and_work_off(rename(b"a", b"b")), [A_OLD, {b"b": OLD}]
        ),
    }.items()
}


# What is there


async def reset(made: World) -> None:
    """Remove everything; the next scenario begins on storage with a long history."""
    for path, parent, name, inode in reversed(list(_walk(made))):
        if made.ledger.table.inode(inode.ino) is None:
            continue  # a block has taken it along
        if inode.is_dir:
            made.tree.rmdir(parent, name)
        else:
            made.tree.unlink(parent, name)
        assert made.catalog.lookup(parent, name) is None, path
    await made.close_prefixes()
    await forget_all(made)
    if made.bucket is not None:
        await made.upload_all()
        assert contents(made) == {}
    await made.check_at_rest()


def _walk(
    made: World, parent: int = ROOT_INO, prefix: bytes = b""
) -> Iterator[tuple[bytes, int, bytes, Inode]]:
    for entry in made.catalog.entries_after(parent, 0, 1000):
        inode = made.tree.inode(entry.ino)
        if made.ledger.removals.expire(inode):
            continue  # its time was over, and nobody had asked
        path = prefix + entry.name + (b"/" if inode.is_dir else b"")
        yield path, parent, entry.name, inode
        if inode.is_dir:
            yield from _walk(made, inode.ino, path)


async def found(made: World) -> State:
    """All that a program would find by reading."""
    state: State = {}
    for path, _, _, inode in list(_walk(made)):
        state[path] = b"" if inode.is_dir else await made.read(inode.ino)
        for name in made.catalog.xattr_names(inode.ino):
            state[path + b"@" + name] = made.attributes.xattr(inode.ino, name)
        for name in made.lifecycle.attributes(inode):
            state[path + b"@" + name] = made.lifecycle.attribute(inode, name) or b""
    return state


def check_copies(made: World) -> None:
    """Check that each recorded copy is there, with the bytes of the seal."""
    for path, _, _, inode in _walk(made):
        if inode.is_dir:
            continue
        assert inode.sealed, f"{path!r} was not sealed"
        for tier in made.ledger.tiers.holders(inode):
            copy = Path(tier.path(inode.ino, inode.version))
            assert copy.exists(), f"{path!r} is not in {tier.name}"
            about = copy.stat()
            assert about.st_mtime_ns == inode.backing_mtime_ns
            sizes = {inode.size}
            if inode.packed is not None and tier is made.nvme:
                sizes.add(inode.packed.size)  # or a death has left it plain
            assert about.st_size in sizes


async def check_state(made: World, scenario: Scenario, allowed: list[State]) -> State:
    """Check that the state is one of those allowed, complete, and without anything else."""
    if not scenario.damaged:
        check_copies(made)
    await made.close_prefixes()
    state = await found(made)
    assert state in allowed, f"found {_brief(state)}, allowed {list(map(_brief, allowed))}"
    if not scenario.damaged:
        assert made.ledger.counters["missing"] == 0
        assert made.ledger.counters["quarantined"] == 0
        check_copies(made)
    await made.walk()
    if made.bucket is not None:
        await made.upload_all()
        files = {path: content for path, content in state.items() if not path.endswith(b"/")}
        assert contents(made) == files, "the bucket has what is here"
        assert modes(made) == {
            path: inode.mode & 0o7777 for path, _, _, inode in _walk(made) if inode.is_file
        }
    await made.check_at_rest()
    check_all_is_named(made)
    return state


def check_all_is_named(made: World) -> None:
    """Check that every inode and mark has a name that leads to it."""
    named = {inode.ino for _, _, _, inode in _walk(made)}
    assert {inode.ino for inode in made.inodes()} == {ROOT_INO, *named}
    for kind in (b"r", b"t", b"p", b"e"):
        assert not made.catalog.marks(kind), kind
    spaces = {ino for ino, _ in made.catalog.marks(b"n")} - {ROOT_INO}
    assert spaces == {space.ino for space in made.ledger.namespaces} - {ROOT_INO}
    assert spaces <= named


def check_end(made: World, scenario: Scenario) -> None:
    if scenario.ends is not None:
        holders = made.ledger.tiers.holders(made.find(b"a"))
        assert tuple(tier.name for tier in holders) == scenario.ends


def _brief(state: State) -> dict[bytes, str]:
    known = {OLD: "OLD", NEW: "NEW", KEPT: "KEPT"}
    return {path: known.get(content, f"{len(content)} bytes") for path, content in state.items()}

"""Each kind of damage, made by hand: found as what it is, mended, and not found again."""

# ruff: noqa: ASYNC240 - files of a few bytes, in a loop that nobody waits for

import errno
import os
import random
import stat
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.catalog import ROOT_INO, Dentry, Inode, keys
from kvfs.core.check import Background, Finding, Survey, check
from kvfs.core.check import background as background_module
from kvfs.core.check import files as files_module
from kvfs.core.check import survey as survey_module
from kvfs.core.ledger.open_table import OpenObject
from kvfs.errors import ControlError, NotFoundError
from kvfs.movement.movers import Moved, MoverFailedError, SourceChangedError
from kvfs.tiers import NoRam, Tier
from tests.unit.world import World, digest, world

POLL = 0.001  # s: what asks in each turn of the loop leaves the interpreter to no other thread

BYTES = random.Random(1).randbytes(100_000)
OTHER = random.Random(2).randbytes(100_000)
DIR = stat.S_IFDIR | 0o755


@dataclass
class Small:
    """A world with one of each: what the damages below are done to."""

    made: World
    a: Inode  # only in RAM, no digest
    b: Inode  # only on NVMe, with a digest
    c: Inode  # in both tiers; two names, in the root and in d
    d: Inode  # a directory
    e: Inode  # a directory in d
    f: Inode  # a file in e, on NVMe
    s: Inode  # a symbolic link

    def record(self, inode: Inode) -> Inode:
        found = self.made.catalog.inode(inode.ino)
        assert found is not None
        return found

    def put(self, inode: Inode, **changes: object) -> None:
        with self.made.catalog.batch() as batch:
            batch.put(replace(self.record(inode), **changes))  # type: ignore[arg-type]

    def erase(self, kind: bytes, key: bytes) -> None:
        with self.made.catalog.batch() as batch:
            batch.erase(kind, key)

    def write(self, kind: bytes, key: bytes, value: bytes) -> None:
        self.made.catalog.commit([(kind + key, value)], sync=False)

    def fact(self, name: str, value: str) -> None:
        with self.made.catalog.batch() as batch:
            batch.set_fact(name, value)

    def file(self, tier: Tier, inode: Inode) -> Path:
        return Path(tier.path(inode.ino, inode.version))

    @property
    def ram(self) -> Tier:
        return self.made.fast

    @property
    def nvme(self) -> Tier:
        return self.made.disk


async def small(made: World) -> Small:
    a = await made.store(b"a", BYTES, made.fast)
    b = await made.store(b"b", BYTES, made.disk)
    await made.settle(b.ino)
    c = await made.store(b"c", BYTES, made.fast)
    await made.demote(c.ino)
    d = made.tree.make(ROOT_INO, b"d", DIR, 0, 0)
    made.tree.link(c.ino, d.ino, b"c2")
    e = made.tree.make(d.ino, b"e", DIR, 0, 0)
    made.expect(b"f", None)
    held = await made.create(b"f", BYTES, e.ino)
    await made.close(held, writable=True)
    await made.settle(held.inode.ino)
    s = made.tree.make(ROOT_INO, b"s", stat.S_IFLNK | 0o777, 0, 0, target=b"a")
    made.attributes.set_xattr(a.ino, b"user.x", b"1")
    inodes = [made.catalog.inode(inode.ino) for inode in (a, b, c, d, e, held.inode, s)]
    return Small(made, *(inode for inode in inodes if inode is not None))


async def look(
    made: World,
    *,
    repair: bool = False,
    hashes: bool = False,
    live: bool = True,
    bucket: bool = False,
) -> tuple[list[Finding], Survey]:
    found: list[Finding] = []

    async def tell(finding: Finding) -> None:
        found.append(finding)
        await trio.lowlevel.checkpoint()

    survey = Survey(
        made.ledger,
        made.movers,
        made.dispatcher._jobs,
        tell,
        repair=repair,
        hashes=hashes,
        live=live,
        remote=made.remote if bucket else None,
    )
    await check(survey)
    await made.dispatcher.trash.empty()
    return found, survey


def state(made: World) -> tuple[object, ...]:
    """All that a dry run must not change."""
    kinds = [bytes([kind]) for kind in b"idcxonrtplmsuz"]
    records = [list(made.catalog.records(kind)) for kind in kinds]
    files = {
        str(path): (path.lstat().st_mtime_ns, path.lstat().st_size)
        for tier in made.tiers
        for folder in ("objects", "quarantine")
        for path in (tier.root / folder).rglob("*")
    }
    return records, files


def flip(path: Path, *, keep_time: bool) -> None:
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


# Damages: each says what it does, and returns what --repair should leave of names.

Damage = Callable[[Small], None]
DAMAGES: dict[str, tuple[Damage, list[str], set[str]]] = {}  # name -> damage, kinds, names gone


def damage(kinds: str, gone: str = "") -> Callable[[Damage], Damage]:
    def register(done: Damage) -> Damage:
        DAMAGES[done.__name__] = done, sorted(kinds.split()), set(gone.split())
        return done

    return register


@damage("name")
def cookie_key_gone(w: Small) -> None:
    w.erase(keys.COOKIES, keys.cookie_key(*w.a.links[0]))


@damage("name")
def name_key_gone(w: Small) -> None:
    w.erase(keys.NAMES, keys.name_key(ROOT_INO, b"a"))


@damage("name")
def name_leads_to_another_inode(w: Small) -> None:
    key = keys.name_key(ROOT_INO, b"a")
    w.write(keys.NAMES, key, keys.cookie_key(w.b.ino, w.a.links[0][1]))


@damage("link", gone="/a")
def both_keys_gone(w: Small) -> None:
    with w.made.catalog.batch() as batch:
        batch.unlink(ROOT_INO, Dentry(b"a", w.a.ino, w.a.links[0][1]))


@damage("link", gone="/d/c2")
def one_of_two_names_gone(w: Small) -> None:
    with w.made.catalog.batch() as batch:
        batch.unlink(w.d.ino, Dentry(b"c2", w.c.ino, w.c.links[1][1]))


@damage("link", gone="/d /d/c2 /d/e /d/e/f")
def directory_without_its_name(w: Small) -> None:
    with w.made.catalog.batch() as batch:
        batch.unlink(ROOT_INO, Dentry(b"d", w.d.ino, w.d.links[0][1]))


@damage("name")
def inode_forgets_its_only_name(w: Small) -> None:
    w.put(w.a, links=())


@damage("name")
def directory_forgets_its_name(w: Small) -> None:
    w.put(w.e, links=())


@damage("name", gone="/d/c2")
def inode_forgets_one_of_two_names(w: Small) -> None:
    w.put(w.c, links=w.c.links[:1])


@damage("link")
def a_link_counted_twice(w: Small) -> None:
    w.put(w.a, links=w.a.links * 2)


@damage("nameless", gone="/a")
def nothing_but_the_record(w: Small) -> None:
    both_keys_gone(w)
    w.put(w.a, links=())


@damage("nameless", gone="/a")
def unlinked_and_closed_but_still_there(w: Small) -> None:
    nothing_but_the_record(w)
    w.write(keys.MARKS, keys.number_key(w.a.ino), b"")


@damage("name")
def nothing_but_the_name_key(w: Small) -> None:
    w.erase(keys.COOKIES, keys.cookie_key(*w.e.links[0]))
    w.put(w.e, links=())


@damage("name", gone="/d/c2")
def second_name_in_a_file(w: Small) -> None:
    entry = Dentry(b"c2", w.c.ino, w.c.links[1][1])
    with w.made.catalog.batch() as batch:
        batch.unlink(w.d.ino, entry)
        batch.link(w.a.ino, entry)
        batch.put(replace(w.c, links=(w.c.links[0], (w.a.ino, entry.cookie))))


@damage("name")
def entry_of_no_inode(w: Small) -> None:
    with w.made.catalog.batch() as batch:
        batch.link(ROOT_INO, Dentry(b"x", 5, 6))


@damage("name")
def stale_name_key(w: Small) -> None:
    w.write(keys.NAMES, keys.name_key(ROOT_INO, b"x"), keys.cookie_key(w.a.ino, 7))


@damage("name", gone="/a")
def two_entries_of_one_name(w: Small) -> None:
    """The entry of `a` says that it is called b: b keeps its name, a needs another."""
    w.erase(keys.NAMES, keys.name_key(ROOT_INO, b"a"))
    key = keys.cookie_key(*w.a.links[0])
    w.write(keys.COOKIES, key, keys.number_key(w.a.ino) + b"b")


@damage("name", gone="/x")
def entry_in_a_file(w: Small) -> None:
    made = w.made.tree.make(ROOT_INO, b"x", stat.S_IFIFO | 0o644, 0, 0)
    with w.made.catalog.batch() as batch:
        batch.unlink(ROOT_INO, Dentry(b"x", made.ino, made.ino))
        batch.link(w.a.ino, Dentry(b"x", made.ino, made.ino))
        batch.put(replace(made, links=((w.a.ino, made.ino),)))


@damage("directory")
def subdirs_too_large(w: Small) -> None:
    w.put(w.d, subdirs=w.d.subdirs + 2)


@damage("directory")
def subdirs_of_the_root(w: Small) -> None:
    w.put(w.record(Inode(ROOT_INO, 0, 0, 0)), subdirs=0)


@damage("directory", gone="/d /d/c2 /d/e /d/e/f")
def directories_in_a_circle(w: Small) -> None:
    """d lies in e, which lies in d."""
    root = w.record(Inode(ROOT_INO, 0, 0, 0))
    with w.made.catalog.batch() as batch:
        batch.unlink(ROOT_INO, Dentry(b"d", w.d.ino, w.d.links[0][1]))
        batch.link(w.e.ino, Dentry(b"d", w.d.ino, w.d.ino))
        batch.put(replace(w.d, links=((w.e.ino, w.d.ino),)))
        batch.put(replace(w.record(w.e), subdirs=1))
        batch.put(replace(root, subdirs=0))


@damage("directory")
def directory_record_gone(w: Small) -> None:
    w.erase(keys.INODES, keys.number_key(w.d.ino))


@damage("directory record")
def directory_record_unreadable(w: Small) -> None:
    w.write(keys.INODES, keys.number_key(w.e.ino), b"nonsense")


@damage("directory")
def root_record_gone(w: Small) -> None:
    w.erase(keys.INODES, keys.number_key(ROOT_INO))


@damage("directory")
def root_is_no_directory(w: Small) -> None:
    w.put(w.record(Inode(ROOT_INO, 0, 0, 0)), mode=stat.S_IFREG | 0o644)


@damage("directory")
def root_with_a_parent(w: Small) -> None:
    w.put(w.record(Inode(ROOT_INO, 0, 0, 0)), links=((w.d.ino, 5),))


@damage("record name attribute leftover", gone="/a")
def record_unreadable(w: Small) -> None:
    w.write(keys.INODES, keys.number_key(w.a.ino), b"nonsense")


@damage("record name leftover", gone="/b")
def record_cut(w: Small) -> None:
    """By just one link, which no unpacking notices."""
    record = w.made.catalog.record(keys.INODES, keys.number_key(w.b.ino))
    assert record is not None
    w.write(keys.INODES, keys.number_key(w.b.ino), record[:-16])


@damage("record record record")
def keys_that_make_no_sense(w: Small) -> None:
    w.write(keys.INODES, b"short", b"")
    w.write(keys.COOKIES, b"short", b"x")
    w.write(keys.NAMES, b"short", b"y")


@damage("attribute")
def attribute_of_no_inode(w: Small) -> None:
    w.write(keys.XATTRS, keys.number_key(5) + b"user.y", b"1")


@damage("mark")
def mark_of_no_inode(w: Small) -> None:
    w.write(keys.MARKS, keys.number_key(5), b"")


@damage("mark")
def mark_of_a_sealed_inode(w: Small) -> None:
    w.write(keys.MARKS, keys.number_key(w.a.ino), b"")


@damage("counter")
def counter_behind_inodes(w: Small) -> None:
    w.made.catalog.count_from(w.s.ino)


@damage("counter")
def counter_behind_cookies(w: Small) -> None:
    w.made.catalog.count_from(w.s.ino + 1)
    cookie = w.s.ino + 10
    with w.made.catalog.batch() as batch:
        batch.unlink(ROOT_INO, Dentry(b"s", w.s.ino, w.s.ino))
        batch.link(ROOT_INO, Dentry(b"s", w.s.ino, cookie))
        batch.put(replace(w.s, links=((ROOT_INO, cookie),)))


@damage("fact fact fact")
def facts_that_make_no_sense(w: Small) -> None:
    w.fact("session", "x")
    w.fact("suspect", "1")
    w.fact("clean", "-1")


@damage("fact")
def memory_numbered_too_low(w: Small) -> None:
    w.fact("ram_epoch", "0")


@damage("lost", gone="/b")
def no_copy_claimed(w: Small) -> None:
    w.put(w.b, on_nvme=False)
    w.file(w.nvme, w.b).unlink()


@damage("missing", gone="/b")
def only_copy_gone(w: Small) -> None:
    w.file(w.nvme, w.b).unlink()


@damage("missing")
def one_of_two_copies_gone(w: Small) -> None:
    w.file(w.ram, w.c).unlink()


@damage("damaged", gone="/b")
def only_copy_cut(w: Small) -> None:
    os.truncate(w.file(w.nvme, w.b), 10)


@damage("damaged")
def one_of_two_copies_cut(w: Small) -> None:
    os.truncate(w.file(w.nvme, w.c), 10)


@damage("damaged damaged", gone="/c /d/c2")
def both_copies_cut(w: Small) -> None:
    os.truncate(w.file(w.nvme, w.c), 10)
    os.truncate(w.file(w.ram, w.c), 10)


@damage("damaged")
def a_directory_for_a_copy(w: Small) -> None:
    path = w.file(w.nvme, w.c)
    path.unlink()
    path.mkdir()


@damage("touched", gone="/a")
def touched_without_digest(w: Small) -> None:
    os.utime(w.file(w.ram, w.a), ns=(1, 2))


@damage("blocks")
def more_blocks_than_accounted(w: Small) -> None:
    w.made.ledger.accounts.dismiss(w.record(w.b))
    w.put(w.b, blocks=0)
    w.made.ledger.accounts.enter(w.record(w.b))


@damage("leftover")
def file_of_no_inode(w: Small) -> None:
    Path(w.nvme.path(5, 1)).write_bytes(b"x")


@damage("leftover")
def file_of_another_version(w: Small) -> None:
    Path(w.ram.path(w.a.ino, w.a.version + 1)).write_bytes(b"x")


@damage("leftover")
def file_in_a_tier_that_has_no_copy(w: Small) -> None:
    Path(w.ram.path(w.b.ino, w.b.version)).write_bytes(b"x")


@damage("part")
def copy_never_finished(w: Small) -> None:
    Path(w.nvme.path(w.a.ino, w.a.version) + ".part").write_bytes(b"x")


@damage("foreign foreign")
def foreign_files(w: Small) -> None:
    Path(w.nvme.folders[3], "README").write_bytes(b"x")
    Path(w.nvme.folders[3], f"0{w.a.ino:x}.1").write_bytes(b"x")


@damage("misplaced")
def file_in_the_wrong_folder(w: Small) -> None:
    path = w.file(w.nvme, w.b)
    path.rename(Path(w.nvme.folders[(w.b.ino + 1) % 8], path.name))


@damage("leftover")
def second_file_in_the_wrong_folder(w: Small) -> None:
    path = w.file(w.nvme, w.b)
    Path(w.nvme.folders[(w.b.ino + 1) % 8], path.name).write_bytes(b"x")


@damage("folder")
def folder_gone(w: Small) -> None:
    ours = {w.file(w.nvme, inode).parent for inode in (w.b, w.c, w.f)}
    folder = next(folder for folder in w.nvme.folders if Path(folder) not in ours)
    Path(folder).rmdir()


@damage("unfinished", gone="/a")
def never_sealed(w: Small) -> None:
    w.made.ledger.accounts.dismiss(w.record(w.a))
    w.put(w.a, sealed=False)


def names(made: World) -> set[str]:
    """All paths, as an application lists them."""

    def below(ino: int, path: str) -> Iterator[str]:
        for name, inode, _ in made.tree.list_entries(ino, 2, 1 << 20).entries:
            here = f"{path}/{name.decode()}"
            yield here
            if inode.is_dir:
                yield from below(inode.ino, here)

    return set(below(ROOT_INO, ""))


def kinds(found: list[Finding]) -> list[str]:
    return sorted(finding.kind for finding in found)


def run(case: Callable[[World], Awaitable[None]], tmp_path: Path) -> None:
    with world(tmp_path) as made:
        trio.run(case, made)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_is_found_mended_and_gone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "CREATE_PATIENCE", 0.0)  # no create is under way
    harm, expected, gone = DAMAGES[name]

    async def case(made: World) -> None:
        there = await small(made)
        before = names(made)
        harm(there)
        was = state(made)
        found, _ = await look(made)
        assert kinds(found) == expected, found
        assert {finding.state for finding in found} == {"found"}
        assert all(finding.cure for finding in found)
        assert state(made) == was, "a dry run changes nothing"
        mended, _ = await look(made, repair=True)
        assert kinds(mended) == expected, mended
        assert {finding.state for finding in mended} == {"repaired"}
        again, _ = await look(made, hashes=True)
        assert again == []
        after = names(made)
        lost_found = {name for name in after if name.startswith("/lost+found")}
        assert after - lost_found == before - gone
        if "/lost+found" in after:
            assert len(lost_found) > 1
        made.check_names()
        made.check_files()
        if name not in UNACCOUNTED:
            made.check_accounts()

    run(case, tmp_path)


# The record was changed without the accounts, as no daemon does.
UNACCOUNTED = {
    "no_copy_claimed",
    "record_unreadable",
    "record_cut",
    "nothing_but_the_record",
    "unlinked_and_closed_but_still_there",
    "inode_forgets_its_only_name",
}


def test_sound_mount_has_no_findings(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await small(made)
        was = state(made)
        for hashes in (False, True):
            for live in (False, True):
                found, survey = await look(made, hashes=hashes, live=live)
                assert found == []
                assert survey.inodes == 8
                assert survey.notes["copies"] == 5
        assert state(made) == was

    run(case, tmp_path)


@pytest.mark.parametrize("keep_time", [True, False])
def test_wrong_bytes_are_found_by_their_digest(keep_time: bool, tmp_path: Path) -> None:  # noqa: FBT001
    async def case(made: World) -> None:
        there = await small(made)
        flip(there.file(made.disk, there.c), keep_time=keep_time)
        found, _ = await look(made)
        assert kinds(found) == ([] if keep_time else ["touched"])
        found, _ = await look(made, hashes=True)
        assert kinds(found) == ["damaged"]
        found, _ = await look(made, repair=True)
        assert [finding.state for finding in found] == ([] if keep_time else ["left"])
        found, _ = await look(made, repair=True, hashes=True)
        assert [(finding.kind, finding.state) for finding in found] == [("damaged", "repaired")]
        assert len(list((made.disk.root / "quarantine").iterdir())) == 1
        assert made.ledger.tiers.holders(made.find(b"c")) == [made.fast]
        assert await made.read(there.c.ino) == BYTES
        assert (await look(made, hashes=True))[0] == []
        made.check()

    run(case, tmp_path)


def test_a_touched_copy_with_its_bytes_gets_its_time_back(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        there = await small(made)
        path = there.file(made.disk, there.c)
        os.utime(path, ns=(1, 2))
        found, _ = await look(made, repair=True, hashes=True)
        assert [(finding.kind, finding.state) for finding in found] == [("touched", "repaired")]
        assert path.stat().st_mtime_ns == there.c.backing_mtime_ns
        assert (await look(made, hashes=True))[0] == []
        assert made.ledger.tiers.holders(made.find(b"c")) == made.tiers

    run(case, tmp_path)


def test_digest_is_computed_only_for_copies_with_their_signature(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        there = await small(made)
        _, survey = await look(made, hashes=True)
        assert survey.notes["without_digest"] == 1
        assert made.find(b"a").digest == b"", "not in a dry run"
        os.utime(there.file(made.fast, there.a), ns=(1, 2))
        other = await made.store(b"z", OTHER, made.fast)
        found, _ = await look(made, repair=True, hashes=True)
        assert kinds(found) == ["touched"]
        assert made.catalog.inode(there.a.ino) is None
        assert made.tree.inode(other.ino).digest == digest(OTHER)

    run(case, tmp_path)


def test_directory_without_record_and_name_keeps_its_entries(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        there = await small(made)
        there.erase(keys.INODES, keys.number_key(there.d.ino))
        with made.catalog.batch() as batch:
            batch.unlink(ROOT_INO, Dentry(b"d", there.d.ino, there.d.links[0][1]))
        assert (await look(made))[0]
        await look(made, repair=True)
        assert (await look(made, hashes=True))[0] == []
        assert names(made) >= {f"/lost+found/{there.d.ino}/{name}" for name in ("c2", "e", "e/f")}
        made.check_names()

    run(case, tmp_path)


def test_lost_found_makes_way_for_names_that_are_taken(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        there = await small(made)
        made.tree.make(ROOT_INO, b"lost+found", stat.S_IFIFO | 0o600, 0, 0)
        other = made.tree.make(ROOT_INO, b"lost+found.", DIR, 0, 0)
        made.tree.make(other.ino, b"%d" % there.a.ino, DIR, 0, 0)
        both_keys_gone(there)
        await look(made, repair=True)
        assert await made.read(made.find(b"%d." % there.a.ino, other.ino).ino) == BYTES
        assert (await look(made, hashes=True))[0] == []

    run(case, tmp_path)


def test_a_directory_among_the_backing_files_is_left(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await small(made)
        Path(made.disk.folders[3], "somebody's").mkdir()
        found, _ = await look(made, repair=True)
        assert [(finding.kind, finding.state) for finding in found] == [("foreign", "left")]
        assert "Is a directory" in found[0].cure

    run(case, tmp_path)


# Objects in use


def test_a_damaged_copy_is_taken_from_an_open_object(tmp_path: Path) -> None:
    """Its handle reads on; no other open gets the copy."""

    async def case(made: World) -> None:
        there = await small(made)
        held = await made.objects.open(there.b.ino, writable=False)
        os.truncate(there.file(made.disk, there.b), 10)
        found, _ = await look(made, repair=True)
        assert [(finding.kind, finding.state) for finding in found] == [("damaged", "repaired")]
        assert made.objects.open_at_once(there.b.ino) is None
        with pytest.raises(NotFoundError):
            await made.objects.open(there.b.ino, writable=False)
        await made.close(held, writable=False)
        assert (await look(made))[0] == []
        made.check()

    run(case, tmp_path)


def test_open_unlinked_and_orphaned_files_are_no_findings(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        there = await small(made)
        fresh = await made.create(b"fresh", BYTES)
        rewritten = await made.objects.open(there.a.ino, writable=True)
        made.write(rewritten, b"new")
        unlinked = await made.objects.open(there.b.ino, writable=False)
        made.tree.unlink(ROOT_INO, b"b")
        made.tree.unlink(ROOT_INO, b"c")
        made.tree.unlink(there.d.ino, b"c2")
        assert there.c.ino in made.ledger.orphans.rooms
        found, _ = await look(made, repair=True, hashes=True)
        assert found == []
        for held, writable in ((fresh, True), (rewritten, True), (unlinked, False)):
            await made.close(held, writable=writable)
        await made.check_at_rest()

    run(case, tmp_path)


def test_a_file_without_a_record_may_be_of_a_create_under_way(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await small(made)
        ino = made.catalog.next_id()
        os.close(made.disk.create(ino, 1))
        assert (await look(made))[0] == []
        assert kinds((await look(made, live=False))[0]) == ["leftover"]

    run(case, tmp_path)


def test_a_suspicion_is_looked_at_again_before_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects come, go, move and are rewritten in each step of the check; nothing is found."""
    seed = 5
    print("seed", seed)
    monkeypatch.setattr(survey_module, "STEP", 0.0)
    monkeypatch.setattr(survey_module, "SHARE", 0.0)

    async def life(made: World, dice: random.Random) -> None:
        held: list[OpenObject] = []
        while True:
            await trio.lowlevel.checkpoint()
            names = [b"%d" % number for number in range(12)]
            name = dice.choice(names)
            there = made.catalog.lookup(ROOT_INO, name)
            what = dice.choice(["store", "demote", "promote", "unlink", "move", "dir", "open"])
            if what == "store" and there is None:
                tier = dice.choice(made.tiers)
                await made.store(name, dice.randbytes(dice.choice([10, 5000, 200_000])), tier)
            elif what == "dir" and there is None:
                made.tree.make(ROOT_INO, name, DIR, 0, 0)
            elif there is None:
                continue
            elif made.tree.inode(there.ino).is_dir:
                if what == "unlink":
                    made.tree.rmdir(ROOT_INO, name)
                elif what == "move" and made.catalog.lookup(ROOT_INO, b"m" + name) is None:
                    made.renames.rename(ROOT_INO, name, ROOT_INO, b"m" + name, 0)
                    made.renames.rename(ROOT_INO, b"m" + name, ROOT_INO, name, 0)
            elif what == "unlink":
                made.tree.unlink(ROOT_INO, name)
                made.ledger.removals.purge(there.ino)
            elif what == "demote":
                await made.demote(there.ino)
            elif what == "promote":
                await made.promote(there.ino)
            elif what == "move":
                made.renames.rename(ROOT_INO, name, ROOT_INO, dice.choice(names) + b"x", 0)
            elif what == "open":
                held.append(await made.objects.open(there.ino, writable=dice.random() < 0.5))
            if len(held) > 3:
                one = held.pop(0)
                await made.close(one, writable=one.writers > 0)
            for ino in list(made.ledger.orphans.rooms)[:-3]:  # as the kernel forgets
                made.ledger.removals.purge(ino)
            await made.dispatcher.trash.empty()

    async def case(made: World) -> None:
        await small(made)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(life, made, random.Random(seed))
            for number in range(60):
                found, survey = await look(made, repair=bool(number % 2), hashes=number % 3 == 0)
                assert found == []
                assert survey.inodes
            nursery.cancel_scope.cancel()

    with world(tmp_path) as made:
        trio.run(case, made)


# Without a mount


def test_remains_of_a_crash_are_noted_and_are_no_damage(tmp_path: Path) -> None:
    async def before(made: World) -> None:
        there = await small(made)
        await made.create(b"torn", BYTES)
        await made.objects.open(there.a.ino, writable=True)
        for held in made.ledger.table.open.values():
            os.close(held.fd)
        made.ledger.table.open.clear()

    async def after(made: World) -> None:
        found, survey = await look(made, live=False)
        assert found == []
        assert survey.notes["unfinished"] == 2

    with world(tmp_path) as made:
        trio.run(before, made)
        trio.run(after, made)


def test_an_object_that_a_crash_left_between_two_versions_is_for_the_next_mount(
    tmp_path: Path,
) -> None:
    """It was about to be written: marked, and its file has the next version's name already."""

    async def before(made: World) -> None:
        there = await small(made)
        for inode in (there.b, there.f):
            with made.catalog.batch() as batch:
                batch.mark_unfinished(inode.ino)
        made.disk.rename(there.b.ino, there.b.version, there.b.version + 1)
        found, survey = await look(made, live=False, repair=True, hashes=True)
        assert found == []
        assert survey.notes["unfinished"] == 2

    async def after(made: World) -> None:
        await made.census()
        assert (await look(made, hashes=True))[0] == []
        assert await made.read(made.find(b"b").ino) == BYTES

    with world(tmp_path) as made:
        trio.run(before, made)
        made.restart(crash=True)
        trio.run(after, made)


def test_memory_that_is_gone_is_noted_and_is_no_damage(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await small(made)
        ledger = made.ledger
        ledger.tiers.ram, ledger.tiers.local = NoRam(), [made.disk]
        found, survey = await look(made, live=False)
        assert found == []
        assert survey.notes["ram_gone"] == 1

    run(case, tmp_path)


def test_after_a_power_loss_copies_are_verified_with_hashes_only(tmp_path: Path) -> None:
    async def before(made: World) -> None:
        await small(made)
        await made.store(b"g", OTHER, made.disk)  # no digest: it was not settled

    async def after(made: World) -> None:
        assert list(made.ledger.suspect)
        await made.census()
        flip(Path(made.disk.path(made.find(b"b").ino, 1)), keep_time=True)
        found, survey = await look(made)
        assert found == []
        assert survey.notes["to_verify"] == 4
        found, survey = await look(made, hashes=True)
        assert kinds(found) == ["damaged", "unproven"]
        assert survey.notes["verified"] == 2
        found, _ = await look(made, hashes=True, repair=True)
        assert Counter(finding.state for finding in found) == {"repaired": 2}
        found, survey = await look(made)
        assert found == []
        assert survey.notes["to_verify"] == 0, "they need not be read again"
        assert names(made) == {"/c", "/d", "/d/c2", "/d/e", "/d/e/f", "/s"}

    with world(tmp_path) as made:
        trio.run(before, made)
        made.restart(crash=True, reboot=True)
        trio.run(after, made)


def test_missing_directory_of_a_tier_is_one_finding(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await small(made)
        (made.disk.root / "objects").rename(made.disk.root / "away")
        found, _ = await look(made, repair=True)
        assert [(finding.kind, finding.state) for finding in found] == [("tier", "left")]
        (made.disk.root / "away").rename(made.disk.root / "objects")
        assert (await look(made, hashes=True))[0] == []

    run(case, tmp_path)


def test_a_tier_that_goes_away_meanwhile_takes_no_object_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NVMe file system that is unmounted in the middle of a repair is no reason to drop all."""

    async def case(made: World) -> None:
        await small(made)
        before = names(made)
        objects, away = made.disk.root / "objects", made.disk.root / "away"

        async def unmount(_: files_module.FileCheck) -> None:
            await trio.lowlevel.checkpoint()
            objects.rename(away)

        with monkeypatch.context() as patch:
            patch.setattr(files_module.FileCheck, "run", unmount)
            found, _ = await look(made, repair=True, hashes=True)
        assert [(finding.kind, finding.state) for finding in found] == [("tier", "left")]
        away.rename(objects)
        assert names(made) == before
        assert (await look(made, hashes=True))[0] == []

    run(case, tmp_path)


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (OSError(errno.EIO, "Input/output error"), "repaired"),
        (OSError(errno.EMFILE, "Too many open files"), "left"),
        (MoverFailedError("3 movers died"), "left"),
        (SourceChangedError("ended at 7 of 9 bytes"), "repaired"),
    ],
)
def test_only_the_devices_own_errors_condemn_a_copy(
    error: Exception, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(made: World) -> None:
        there = await small(made)
        bad = str(there.file(made.disk, there.b))
        read_through = made.movers.read_through

        async def fail(source: str, size: int, *, sync: bool, sparse: bool, data: int) -> Moved:
            if source == bad:
                raise error
            return await read_through(source, size, sync=sync, sparse=sparse, data=data)

        monkeypatch.setattr(made.movers, "read_through", fail)
        found, _ = await look(made, hashes=True, repair=True)
        assert [finding.state for finding in found] == [state]
        assert ("/b" in names(made)) is (state == "left")

    run(case, tmp_path)


def test_a_folder_that_cannot_be_read_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(made: World) -> None:
        there = await small(made)
        folder = there.file(made.disk, there.b).parent
        listdir, lstat = os.listdir, os.lstat

        def fail(path: str) -> list[str]:
            if Path(path) == folder:
                raise OSError(errno.EIO, "Input/output error", path)
            return listdir(path)

        def fail_too(path: str) -> os.stat_result:
            if Path(path).parent == folder:
                raise OSError(errno.EIO, "Input/output error", path)
            return lstat(path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", fail)
            patch.setattr(os, "lstat", fail_too)
            found, _ = await look(made, repair=True)
        assert [(finding.kind, finding.state) for finding in found] == [
            ("folder", "left"),
            ("unread", "left"),
        ]
        assert (await look(made))[0] == []

    run(case, tmp_path)


def test_quarantine_is_counted_and_left_alone(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        await small(made)
        kept = made.disk.root / "quarantine" / "1f.1"
        kept.write_bytes(b"evidence")
        found, survey = await look(made, repair=True)
        assert found == []
        assert survey.notes["quarantined"] == 1
        assert kept.read_bytes() == b"evidence"

    run(case, tmp_path)


# Beside a mount


def test_check_runs_while_a_client_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_module, "FINDINGS_MAX", 2)
    monkeypatch.setattr(background_module, "PATIENCE", 0.3)

    async def case(made: World) -> None:
        await small(made)
        for number in range(7):
            Path(made.disk.folders[number], "foreign").write_bytes(b"x")
        checks = Background(made.ledger, made.movers, made.dispatcher._jobs)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checks.run)
            with pytest.raises(ControlError, match="no check was started"):
                await checks.look()
            await checks.start(repair=False, hashes=False)
            with pytest.raises(ControlError, match="running already"):
                await checks.start(repair=False, hashes=False)
            found: list[str] = []
            while not (answer := await checks.look())["ended"] or answer["findings"]:
                assert len(answer["findings"]) <= 2
                found += [finding["kind"] for finding in answer["findings"]]
                await trio.sleep(POLL)
            assert found == ["foreign"] * 7
            assert answer["failed"] == ""
            assert answer["inodes"] == 8

            await checks.start(repair=False, hashes=False)
            with trio.fail_after(60):
                while checks._jobs.alive:  # noqa: ASYNC110 (nobody may ask)
                    await trio.sleep(POLL)
            assert "nobody has asked" in (await checks.look())["failed"]
            await checks.start(repair=True, hashes=False)
            while not (await checks.look())["ended"]:  # noqa: ASYNC110 (as clients do)
                await trio.sleep(POLL)
            nursery.cancel_scope.cancel()

    run(case, tmp_path)


def test_a_check_does_not_make_up_for_the_work_of_others(tmp_path: Path) -> None:
    """A daemon that is busy for seconds while the check waits for a disk has it go on at once."""
    worked = 0.0

    def clock() -> float:
        nonlocal worked
        worked += 5.0
        return worked

    async def case(made: World) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "thread_time", clock)
            survey = Survey(
                made.ledger, made.movers, set(), told, repair=False, hashes=False, live=True
            )
            began = trio.current_time()
            await survey.step()
            return trio.current_time() - began

    async def told(_: Finding) -> None:
        raise AssertionError

    with world(tmp_path) as made:
        slept = trio.run(case, made, clock=trio.testing.MockClock(autojump_threshold=0))
    assert slept <= survey_module.STEP_MAX * survey_module.SHARE + 1e-9


def test_a_check_that_fails_says_so_and_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(made: World) -> None:
        checks = Background(made.ledger, made.movers, made.dispatcher._jobs)
        errors: list[Exception] = [OSError(5, "Input/output error"), ZeroDivisionError("odd")]

        async def fail(survey: Survey) -> None:
            assert survey.live
            await trio.lowlevel.checkpoint()
            raise errors[0]

        monkeypatch.setattr(background_module, "check", fail)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checks.run)
            for words in ("Input/output error", "ZeroDivisionError"):
                await checks.start(repair=False, hashes=False)
                while not (answer := await checks.look())["ended"]:
                    await trio.lowlevel.checkpoint()
                assert words in answer["failed"]
                errors.pop(0)
            nursery.cancel_scope.cancel()

    run(case, tmp_path)

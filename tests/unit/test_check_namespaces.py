"""Damage to namespaces, made by hand: found, mended and gone; and what only looks like damage."""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import trio

from kvfs.catalog import ROOT_INO, Batch, Catalog, Dentry, Inode, keys
from kvfs.core.admin.lifecycle import Lifecycle
from kvfs.core.names.walks import Walks
from kvfs.settings import Settings
from tests.unit.formats import CONTENT, A, write_format1
from tests.unit.test_check import BYTES, DIR, kinds, look, names, state
from tests.unit.world import World, world


@dataclass
class Spaces:
    """A world with the namespaces `n`, `m` and one that was dropped, in which `gone/f` was."""

    made: World
    n: Inode
    m: Inode
    gone: Inode
    a: Inode  # a file in the root
    d: Inode  # a directory in n, with the file f
    f: Inode

    def record(self, inode: Inode) -> Inode:
        found = self.made.catalog.inode(inode.ino)
        assert found is not None
        return found

    def put(self, inode: Inode, **changes: object) -> None:
        with self.made.catalog.batch() as batch:
            batch.put(replace(self.record(inode), **changes))  # type: ignore[arg-type]

    def write(self, kind: bytes, key: bytes | Inode, value: bytes = b"") -> None:
        raw = keys.number_key(key.ino) if isinstance(key, Inode) else key
        self.made.catalog.commit([(kind + raw, value)], sync=False)

    def erase_name(self, parent: int, name: bytes) -> None:
        entry = self.made.catalog.lookup(parent, name)
        assert entry is not None
        with self.made.catalog.batch() as batch:
            batch.unlink(parent, entry)


def lifecycle(made: World) -> Lifecycle:
    return Lifecycle(made.tree, invalidate_tree=made._gone, warmer=made.dispatcher.warm)


async def store(made: World, name: bytes, parent: int) -> Inode:
    held = await made.create(name, BYTES, parent)
    await made.close(held, writable=True)
    return held.inode


async def spaces(made: World) -> Spaces:
    found = {}
    for name in ("n", "m", "gone"):
        lifecycle(made).make(name, {"quota_hard": "1G"}, uid=0, gid=0)
        found[name] = made.find(name.encode())
    await walk(made)
    a = await store(made, b"a", ROOT_INO)
    d = made.tree.make(found["n"].ino, b"d", DIR, 0, 0)
    f = await store(made, b"f", d.ino)
    await store(made, b"f", found["gone"].ino)
    lifecycle(made).drop(found["gone"])
    return Spaces(made, **found, a=a, d=d, f=f)


def number(value: int) -> bytes:
    return keys.number_key(value)


Harm = Callable[[Spaces], None]
HARMS: dict[str, tuple[Harm, list[str], set[str]]] = {}  # name -> harm, kinds, names gone


def harm(kinds: str, gone: str = "") -> Callable[[Harm], Harm]:
    def register(done: Harm) -> Harm:
        HARMS[done.__name__] = done, sorted(kinds.split()), set(gone.split())
        return done

    return register


@harm("mark mark mark mark")
def marks_of_no_inode(w: Spaces) -> None:
    for kind in (keys.SETTINGS, keys.DROPPED, keys.UNACCOUNTED):
        w.write(kind, number(5), Settings().to_json().encode())
    w.write(keys.UNPUBLISHED, number(5), number(ROOT_INO) + b"name")


@harm("mark mark mark mark")
def marks_of_a_file(w: Spaces) -> None:
    w.write(keys.SETTINGS, w.a, Settings().to_json().encode())
    w.write(keys.DROPPED, w.a)
    w.write(keys.UNACCOUNTED, w.a)
    w.write(keys.UNPUBLISHED, w.a, number(ROOT_INO) + b"name")


@harm("mark mark mark mark record")
def keys_that_are_no_numbers(w: Spaces) -> None:
    for kind in (keys.SETTINGS, keys.DROPPED, keys.UNACCOUNTED, keys.UNPUBLISHED, keys.MODELS):
        w.write(kind, b"short", b"{}")


@harm("mark")
def settings_of_a_directory_below(w: Spaces) -> None:
    w.write(keys.SETTINGS, w.d, Settings().to_json().encode())


@harm("settings")
def settings_that_are_no_json(w: Spaces) -> None:
    w.write(keys.SETTINGS, w.n, b"{\xff")


@harm("settings")
def settings_that_are_no_texts(w: Spaces) -> None:
    w.write(keys.SETTINGS, w.n, b'{"ttl": 5}')


@harm("settings settings")
def settings_that_nobody_knows(w: Spaces) -> None:
    w.write(keys.SETTINGS, w.n, b'{"volume": "11"}')
    w.write(keys.SETTINGS, number(ROOT_INO), b'{"weight": "0"}')


@harm("mark")
def the_root_was_dropped(w: Spaces) -> None:
    w.write(keys.DROPPED, number(ROOT_INO))


@harm("mark", gone="/n /n/d /n/d/f")
def dropped_but_with_a_name(w: Spaces) -> None:
    w.write(keys.DROPPED, w.n)
    w.made.catalog.commit([(keys.SETTINGS + number(w.n.ino), None)], sync=False)


@harm("mark mark")
def dropped_under_names_that_make_no_sense(w: Spaces) -> None:
    for name, text in ((b"one", b"a/b"), (b"two", b"x" * 256)):
        top = w.made.mkdir(name)
        w.made.drop(name.decode())
        w.write(keys.DROPPED, top, text)


@harm("namespace")
def accounted_to_what_is_not_there(w: Spaces) -> None:
    w.put(w.a, namespace=999)


@harm("namespace namespace")
def a_directory_and_a_file_accounted_to_what_is_not_there(w: Spaces) -> None:
    w.put(w.d, namespace=999)
    w.put(w.f, namespace=998)


@harm("namespace namespace")
def accounted_to_where_it_does_not_lie(w: Spaces) -> None:
    w.put(w.f, namespace=w.m.ino)
    w.put(w.a, namespace=w.m.ino)


@harm("namespace")
def accounted_to_what_was_dropped(w: Spaces) -> None:
    w.put(w.f, namespace=w.gone.ino)


@harm("namespace")
def a_namespace_accounted_to_the_mount(w: Spaces) -> None:
    w.put(w.n, namespace=ROOT_INO)


@harm("namespace")
def the_root_accounted_to_a_namespace(w: Spaces) -> None:
    w.put(Inode(ROOT_INO, 0, 0, 0), namespace=w.n.ino)


@harm("namespace namespace namespace")
def settings_lost(w: Spaces) -> None:
    """The files of the namespace become the mount's own."""
    w.made.catalog.commit([(keys.SETTINGS + number(w.n.ino), None)], sync=False)


@harm("link", gone="/n /n/d /n/d/f")
def a_namespace_without_its_name(w: Spaces) -> None:
    w.erase_name(ROOT_INO, b"n")


@harm("link", gone="/n/d /n/d/f")
def a_directory_of_a_namespace_without_its_name(w: Spaces) -> None:
    w.erase_name(w.n.ino, b"d")


@harm("link", gone="/n/d/f")
def a_file_of_a_namespace_without_its_name(w: Spaces) -> None:
    w.erase_name(w.d.ino, b"f")


@harm("name", gone="/x")
def an_entry_of_what_was_dropped(w: Spaces) -> None:
    with w.made.catalog.batch() as batch:
        batch.link(ROOT_INO, Dentry(b"x", w.gone.ino, w.made.catalog.next_id()))


@harm("directory")
def a_namespace_without_its_record(w: Spaces) -> None:
    w.made.catalog.commit([(keys.INODES + number(w.n.ino), None)], sync=False)


@harm("directory")
def a_directory_of_a_namespace_without_its_record(w: Spaces) -> None:
    w.made.catalog.commit([(keys.INODES + number(w.d.ino), None)], sync=False)


@harm("record model")
def a_model_whose_name_makes_no_sense(w: Spaces) -> None:
    w.write(keys.MODELS, number(1), b"no zero in it")
    w.put(w.f, model=1)


@harm("model")
def a_model_that_is_not_there(w: Spaces) -> None:
    w.put(w.f, model=7)


@harm("nameless")
def never_published_and_no_longer_marked(w: Spaces) -> None:
    w.put(w.record(w.a), ino=w.made.catalog.next_id(), links=(), sealed=False, ram_epoch=0)
    w.write(keys.UNPUBLISHED, number(w.made.catalog.counter - 1), number(ROOT_INO) + b"new")


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("name", HARMS)
def test_a_damage_is_found_mended_and_gone(name: str, tmp_path: Path, *, live: bool) -> None:
    """Beside a mount that was begun with it, and without one."""
    done, expected, gone = HARMS[name]

    async def before(made: World) -> set[str]:
        there = await spaces(made)
        found = names(made)
        done(there)
        return found

    async def after(made: World, before: set[str]) -> None:
        await made.census()
        was = state(made)
        found, _ = await look(made, live=live)
        assert kinds(found) == expected, found
        assert {finding.state for finding in found} == {"found"}
        assert state(made) == was, "a dry run changes nothing"
        mended, _ = await look(made, repair=True, live=live)
        assert kinds(mended) == expected, mended
        assert {finding.state for finding in mended} == {"repaired"}
        assert (await look(made, hashes=True, live=live))[0] == []
        made.restart()
        await made.census()
        assert (await look(made, hashes=True))[0] == []
        after = names(made)
        lost_found = {name for name in after if name.startswith("/lost+found")}
        assert after - lost_found == before - gone
        await walk(made)
        assert (await look(made, hashes=True))[0] == []
        assert names(made) == after
        made.check_accounts()
        made.check_names()
        made.check_files()

    with world(tmp_path) as made:
        there = trio.run(before, made)
        made.restart()
        trio.run(after, made, there)


async def walk(made: World) -> None:
    """Follow all marks to their end."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Walks(made.tree, made.quota).run)
        namespaces = made.ledger.namespaces
        with trio.fail_after(60):
            while namespaces.dropped or namespaces.unaccounted:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    await made.dispatcher.trash.empty()


def test_a_namespace_that_lost_its_name_keeps_its_settings(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        there = await spaces(made)
        there.erase_name(ROOT_INO, b"n")
        there.erase_name(ROOT_INO, b"a")
        await look(made, repair=True)
        lost = made.find(b"lost+found").ino
        assert made.find(b"%d" % there.n.ino, lost).namespace == there.n.ino
        made.renames.rename(lost, b"%d" % there.n.ino, ROOT_INO, b"again", 0)
        settings = lifecycle(made).settings(lifecycle(made).directory("again"))
        assert settings.quota_hard == 1 << 30
        assert (await look(made))[0] == []

    with world(tmp_path) as made:
        trio.run(case, made)


def test_settings_that_make_no_sense_become_the_defaults(tmp_path: Path) -> None:
    async def before(made: World) -> None:
        there = await spaces(made)
        there.write(keys.SETTINGS, there.n, b"nonsense")

    async def after(made: World) -> None:
        await made.census()
        (finding,) = (await look(made, repair=True))[0]
        assert finding.path == "/n"
        assert "nonsense" in finding.what
        text = made.catalog.mark(b"n", made.find(b"n").ino)
        assert text is not None
        assert Settings.from_json(text.decode()) == Settings()

    with world(tmp_path) as made:
        trio.run(before, made)
        made.restart()
        trio.run(after, made)


# States that are no damage


@pytest.mark.parametrize("live", [True, False])
def test_a_dropped_tree_is_right_at_every_step_of_its_walk(tmp_path: Path, *, live: bool) -> None:
    async def case(made: World) -> None:
        there = await spaces(made)
        for number in range(40):
            await store(made, b"%d" % number, there.d.ino)
        e = made.tree.make(there.d.ino, b"e", DIR, 0, 0)
        await store(made, b"f", e.ino)
        made.tree.link(there.f.ino, there.d.ino, b"f2")
        held = await made.objects.open(there.f.ino, writable=False)
        was = made.find(b"n").ino
        lifecycle(made).drop(made.find(b"n"))
        steps = 0

        async def pause() -> None:
            nonlocal steps
            steps += 1
            await trio.lowlevel.checkpoint()
            assert (await look(made, live=live))[0] == []

        walks = Walks(made.tree, made.quota)
        walks._pause = pause  # type: ignore[method-assign]
        await walks._clear(was)
        await walks._clear(there.gone.ino)
        assert steps > 5
        assert names(made) == {"/a", "/m"}
        made.check_accounts()
        await made.close(held, writable=False)
        await made.check_at_rest()
        assert (await look(made, live=live, hashes=True))[0] == []

    with world(tmp_path) as made:
        trio.run(case, made)


def test_moved_directory_is_no_finding_before_its_walk(tmp_path: Path) -> None:
    """Also where the namespace that it came from was dropped meanwhile, and a name stayed there."""

    async def case(made: World) -> None:
        there = await spaces(made)
        other = await store(made, b"g", there.d.ino)
        made.tree.link(other.ino, there.n.ino, b"g2")
        made.renames.rename(there.n.ino, b"d", there.m.ino, b"d", 0)
        for live in (True, False):
            assert (await look(made, live=live))[0] == []
        lifecycle(made).drop(made.find(b"n"))
        for live in (True, False):
            assert (await look(made, live=live))[0] == []
        await walk(made)
        assert (await look(made))[0] == []
        made.check_accounts()
        assert {"/m/d/f", "/m/d/g"} <= names(made)
        assert await made.read(there.f.ino) == BYTES

    with world(tmp_path) as made:
        trio.run(case, made)


def test_removed_directory_takes_its_hidden_entries_along(tmp_path: Path) -> None:
    """An expired file is open. A file that was moved out of a namespace before its drop stays."""

    async def case(made: World) -> None:
        there = await spaces(made)
        lifecycle(made).change(made.find(b"m"), {"ttl": "1s"})
        e = made.tree.make(there.m.ino, b"e", DIR, 0, 0)
        one = await store(made, b"x", e.ino)
        made.tree.link(one.ino, e.ino, b"x2")
        held = await made.objects.open(one.ino, writable=False)
        held.inode.mtime_ns = 0
        made.tree.rmdir(there.m.ino, b"e")
        await made.close(held, writable=False)

        made.renames.rename(there.n.ino, b"d", ROOT_INO, b"d", 0)
        deep = made.tree.make(there.d.ino, b"deep", DIR, 0, 0)
        made.renames.rename(there.d.ino, b"deep", there.n.ino, b"deep", 0)
        await store(made, b"y", deep.ino)
        made.renames.rename(there.n.ino, b"deep", there.d.ino, b"deep", 0)
        lifecycle(made).drop(made.find(b"n"))
        await walk(made)
        assert names(made) == {"/a", "/d", "/d/f", "/d/deep", "/d/deep/y", "/m"}
        assert (await look(made))[0] == []
        await made.check_at_rest()

    with world(tmp_path) as made:
        trio.run(case, made)


def test_unpublished_file_is_no_damage(tmp_path: Path) -> None:
    """While it is written, and after a death; the next mount removes it, mark and all."""

    async def before(made: World) -> None:
        await spaces(made)
        lifecycle(made).change(made.find(b"m"), {"publish": "close"})
        held = await made.create(b"new", BYTES, made.find(b"m").ino)
        assert (await look(made, repair=True))[0] == []
        os.close(held.fd)
        made.ledger.table.open.clear()
        found, survey = await look(made, live=False, repair=True)
        assert (found, survey.notes["unfinished"]) == ([], 1)

    async def after(made: World) -> None:
        await made.census()
        assert (await look(made))[0] == []
        assert made.catalog.marks(keys.UNPUBLISHED) == []

    with world(tmp_path) as made:
        trio.run(before, made)
        made.restart(crash=True)
        trio.run(after, made)


def test_directories_and_special_files_in_limbo_are_no_damage(tmp_path: Path) -> None:
    async def before(made: World) -> None:
        there = await spaces(made)
        made.tree.make(there.d.ino, b"empty", DIR, 0, 0)
        made.tree.make(there.d.ino, b"fifo", stat.S_IFIFO | 0o644, 0, 0)
        made.renames.rename(there.d.ino, b"empty", ROOT_INO, b"empty", 0)  # to be accounted anew
        made.tree.rmdir(ROOT_INO, b"empty")
        made.tree.unlink(there.d.ino, b"fifo")
        assert len(made.ledger.orphans.rooms) == 2
        assert (await look(made, repair=True))[0] == []
        made.ledger.orphans.rooms.clear()
        found, survey = await look(made, live=False, repair=True)
        assert (found, survey.notes["unfinished"]) == ([], 2)

    async def after(made: World) -> None:
        await made.census()
        for live in (True, False):
            assert (await look(made, live=live))[0] == []
        assert made.catalog.marks(keys.UNACCOUNTED) == []

    with world(tmp_path) as made:
        trio.run(before, made)
        made.restart(crash=True)
        trio.run(after, made)


# Catalogs of format 1


def test_a_catalog_of_format_1_is_read_and_becomes_one_of_format_2(tmp_path: Path) -> None:
    write_format1(tmp_path / "catalog", tmp_path / "nvme")

    async def case(made: World) -> None:
        assert made.catalog.fact("format") == "1"
        assert (await look(made, hashes=True))[0] == []
        assert names(made) == {"/a", "/d", "/d/a2", "/d/e", "/d/s"}, "torn was dropped"
        assert await made.read(A) == CONTENT
        assert made.attributes.xattr(A, b"user.x") == b"y"
        assert made.find(b"s", made.find(b"d").ino).target == b"../a"
        assert made.find(b"a").namespace == ROOT_INO
        made.check()
        assert made.catalog.fact("format") == "1", "the kvfs that wrote it can have it back"

        found = lifecycle(made).make("d", {"quota_hard": "1G"}, uid=0, gid=0)
        assert made.catalog.fact("format") == "2", "and still the next one's, without a bucket"
        await walk(made)
        assert (found.objects, made.find(b"e", found.ino).namespace) == (1, found.ino)
        assert (await look(made, hashes=True))[0] == []
        made.check_accounts()

    with world(tmp_path, folders=256) as made:  # as that kvfs had
        trio.run(case, made)


def test_anything_that_format_1_did_not_know_makes_it_format_2(tmp_path: Path) -> None:
    changes: tuple[Callable[[Batch], None], ...] = (
        lambda batch: batch.put(Inode(20, stat.S_IFREG, 0, 0, key=1)),
        lambda batch: batch.put(Inode(20, stat.S_IFDIR, 0, 0, namespace=20)),
        lambda batch: batch.mark(b"n", 1, Settings().to_json().encode()),
    )
    for count, change in enumerate(changes):
        path = tmp_path / str(count)
        write_format1(path, tmp_path / "nvme")
        catalog = Catalog(path)
        with catalog.batch() as batch:
            batch.put(Inode(20, stat.S_IFREG, 0, 0))
        assert catalog.fact("format") == "1"
        with catalog.batch() as batch:
            change(batch)
        assert catalog.fact("format") == "2"
        catalog.close()

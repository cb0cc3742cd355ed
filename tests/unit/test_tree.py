"""Names, on a real catalog and without tiers: everything but regular files."""

import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.catalog import LINK_MAX, ROOT_INO, Catalog, Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.tiers import Tiers
from kvfs.core.names import tree as module
from kvfs.core.names.attributes import Attributes
from kvfs.core.names.renames import RENAME_EXCHANGE, RENAME_NOREPLACE, Renames
from kvfs.core.names.tree import Tree
from kvfs.core.namespaces.namespace import ATIME_STEP
from kvfs.errors import (
    AttributeTooLargeError,
    ExistsError,
    InvalidError,
    IsADirError,
    KvfsError,
    NameTooLongError,
    NoAttributeError,
    NotADirError,
    NotEmptyError,
    NotFoundError,
    NotPermittedError,
    StaleError,
    TooManyLinksError,
    UnsupportedError,
)
from kvfs.fuse.errnos import errno_of

Names = tuple[bytes, ...]
DIR, FIFO = stat.S_IFDIR | 0o755, stat.S_IFIFO | 0o644
HOSTILE = [b"\x00x", b"\xff" * 255, b"a" * 255, b"...", b" ", b"\n", "\u20ac".encode(), b"a/b"]


class Clock:
    """Every look at it is a second later."""

    def __init__(self) -> None:
        self.now = 10**18

    def __call__(self) -> int:
        self.now += 10**9
        return self.now


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    catalog = Catalog(tmp_path / "catalog")
    made = Tree(
        Ledger(catalog, Tiers(None, None), session=1, invalidate_name=lambda *_: None), now=Clock()
    )
    made.make_root(uid=7, gid=8)
    yield made
    check(made)
    catalog.close()


def check(tree: Tree) -> None:
    """Links of inodes and entries of directories say the same, and so do link counts."""
    inodes = {inode.ino: inode for inode in tree.catalog.inodes_after(0, 1 << 20)}
    links, subdirs = set(), dict.fromkeys(inodes, 0)
    for inode in inodes.values():
        for parent, cookie in inode.links:
            if inode.ino != ROOT_INO:
                links.add((parent, cookie, inode.ino))
                subdirs[parent] += inode.is_dir
    entries = {
        (ino, entry.cookie, entry.ino)
        for ino in inodes
        for entry in tree.catalog.entries_after(ino, 0, 1 << 20)
    }
    assert links == entries
    assert {ino: inode.subdirs for ino, inode in inodes.items()} == subdirs


def mkdir(tree: Tree, name: bytes, parent: int = ROOT_INO) -> int:
    return tree.make(parent, name, DIR, 0, 0).ino


def fifo(tree: Tree, name: bytes, parent: int = ROOT_INO) -> int:
    return tree.make(parent, name, FIFO, 0, 0).ino


def names(tree: Tree, ino: int = ROOT_INO) -> list[bytes]:
    return [name for name, _, _ in tree.list_entries(ino, module.COOKIE_PARENT, 1000).entries]


# Making and looking


def test_the_root_is_made_once(tree: Tree) -> None:
    root = tree.inode(ROOT_INO)
    assert (root.uid, root.gid, root.mode) == (7, 8, DIR)
    assert root.nlink == 2
    tree.make_root(uid=1, gid=1)
    assert tree.inode(ROOT_INO) == root


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_any_bytes(tree: Tree, name: bytes) -> None:
    ino = mkdir(tree, name)
    assert tree.lookup(ROOT_INO, name).ino == ino
    assert names(tree) == [name]
    tree.rmdir(ROOT_INO, name)
    with pytest.raises(NotFoundError):
        tree.lookup(ROOT_INO, name)


def test_names_are_bounded(tree: Tree) -> None:
    fifo(tree, b"a")
    long = b"x" * 256
    for call in (
        lambda: tree.lookup(ROOT_INO, long),
        lambda: mkdir(tree, long),
        lambda: tree.unlink(ROOT_INO, long),
        lambda: tree.rmdir(ROOT_INO, long),
        lambda: Renames(tree).rename(ROOT_INO, b"a", ROOT_INO, long, 0),
        lambda: Renames(tree).rename(ROOT_INO, long, ROOT_INO, b"b", 0),
        lambda: tree.make(ROOT_INO, b"link", stat.S_IFLNK, 0, 0, target=b"t" * 4096),
    ):
        with pytest.raises(NameTooLongError):
            call()
    assert tree.make(ROOT_INO, b"link", stat.S_IFLNK, 0, 0, target=b"t" * 4095).size == 4095


def test_dot_and_dotdot(tree: Tree) -> None:
    """NFS looks up any inode by `.`."""
    one = mkdir(tree, b"one")
    two = mkdir(tree, b"two", one)
    pipe = fifo(tree, b"pipe", two)
    assert tree.lookup(two, b".").ino == two
    assert tree.lookup(two, b"..").ino == one
    assert tree.lookup(ROOT_INO, b"..").ino == ROOT_INO
    assert tree.lookup(pipe, b".").ino == pipe
    with pytest.raises(NotADirError):
        tree.lookup(pipe, b"..")
    for name in (b".", b".."):
        with pytest.raises(ExistsError):
            mkdir(tree, name)


def test_existing_name_is_eexist(tree: Tree) -> None:
    ino = fifo(tree, b"a")
    for call in (lambda: mkdir(tree, b"a"), lambda: tree.link(ino, ROOT_INO, b"a")):
        with pytest.raises(ExistsError):
            call()


def test_operations_below_a_fifo_are_enotdir(tree: Tree) -> None:
    pipe = fifo(tree, b"pipe")
    for call in (
        lambda: mkdir(tree, b"a", pipe),
        lambda: tree.unlink(pipe, b"a"),
        lambda: tree.rmdir(pipe, b"a"),
        lambda: Renames(tree).rename(ROOT_INO, b"pipe", pipe, b"a", 0),
        lambda: tree.directory(pipe),
    ):
        with pytest.raises(NotADirError):
            call()


def test_removed_open_directory_keeps_its_attributes(tree: Tree) -> None:
    ino = mkdir(tree, b"a")
    tree.rmdir(ROOT_INO, b"a")
    found = tree.inode(ino)
    assert (found.is_dir, found.nlink) == (True, 0)
    for call in (
        lambda: mkdir(tree, b"b", ino),
        lambda: tree.lookup(ino, b"b"),
        lambda: tree.lookup(ino, b".."),
        lambda: Renames(tree).rename(ROOT_INO, b"x", ino, b"y", 0),
    ):
        with pytest.raises(NotFoundError):
            call()
    assert tree.list_entries(ino, 0, 10).entries == []


def test_a_directory_that_is_gone_is_stale_and_has_no_names(tree: Tree) -> None:
    """A program may be inside: the walk over a dropped namespace removes open files, too."""
    ino = mkdir(tree, b"a")
    tree.rmdir(ROOT_INO, b"a")
    tree.ledger.removals.purge(ino)
    with pytest.raises(StaleError):
        tree.inode(ino)
    for call in (
        lambda: mkdir(tree, b"b", ino),
        lambda: tree.lookup(ino, b"b"),
        lambda: Renames(tree).rename(ROOT_INO, b"x", ino, b"y", 0),
    ):
        with pytest.raises(NotFoundError):
            call()
    assert tree.list_entries(ino, 0, 10).entries == []


def test_a_setgid_directory_passes_its_group_on(tree: Tree) -> None:
    ino = mkdir(tree, b"a")
    Attributes(tree).change(ino, mode=DIR | stat.S_ISGID, gid=5)
    child = tree.make(ino, b"dir", DIR, 1, 1)
    pipe = tree.make(ino, b"pipe", FIFO, 1, 1)
    assert (child.uid, child.gid, child.mode) == (1, 5, DIR | stat.S_ISGID)
    assert (pipe.gid, pipe.mode) == (5, FIFO)


def test_devices_and_links_keep_their_type_and_target(tree: Tree) -> None:
    device = tree.make(ROOT_INO, b"null", stat.S_IFCHR | 0o666, 0, 0, rdev=os.makedev(1, 3))
    link = tree.make(ROOT_INO, b"link", stat.S_IFLNK | 0o777, 0, 0, target=b"to\xff")
    assert tree.inode(device.ino).rdev == os.makedev(1, 3)
    assert (tree.inode(link.ino).target, link.size) == (b"to\xff", 3)


def test_link_counts_of_directories(tree: Tree) -> None:
    one, two = mkdir(tree, b"one"), mkdir(tree, b"two")
    assert tree.inode(ROOT_INO).nlink == 4
    mkdir(tree, b"sub", one)
    fifo(tree, b"pipe", one)
    assert tree.inode(one).nlink == 3
    Renames(tree).rename(one, b"sub", two, b"sub", 0)
    assert (tree.inode(one).nlink, tree.inode(two).nlink) == (2, 3)
    tree.rmdir(two, b"sub")
    assert tree.inode(two).nlink == 2


def test_hard_links(tree: Tree) -> None:
    ino = fifo(tree, b"a")
    folder = mkdir(tree, b"folder")
    assert tree.link(ino, folder, b"b").nlink == 2
    tree.unlink(ROOT_INO, b"a")
    assert tree.lookup(folder, b"b").ino == ino
    tree.unlink(folder, b"b")
    with pytest.raises(NotFoundError):
        tree.link(ino, ROOT_INO, b"c")
    with pytest.raises(NotPermittedError):
        tree.link(folder, ROOT_INO, b"d")


def test_hard_links_are_bounded(tree: Tree) -> None:
    ino = fifo(tree, b"0")
    for number in range(1, LINK_MAX):
        tree.link(ino, ROOT_INO, b"%d" % number)
    with pytest.raises(TooManyLinksError):
        tree.link(ino, ROOT_INO, b"one more")


# Removing


def test_removing_the_wrong_kind(tree: Tree) -> None:
    mkdir(tree, b"dir")
    fifo(tree, b"pipe")
    with pytest.raises(IsADirError):
        tree.unlink(ROOT_INO, b"dir")
    with pytest.raises(NotADirError):
        tree.rmdir(ROOT_INO, b"pipe")
    with pytest.raises(InvalidError):
        tree.rmdir(ROOT_INO, b".")
    with pytest.raises(NotEmptyError):
        tree.rmdir(ROOT_INO, b"..")
    for call in (tree.unlink, tree.rmdir):
        with pytest.raises(NotFoundError):
            call(ROOT_INO, b"none")


def test_only_empty_directories_are_removed(tree: Tree) -> None:
    ino = mkdir(tree, b"dir")
    fifo(tree, b"pipe", ino)
    with pytest.raises(NotEmptyError):
        tree.rmdir(ROOT_INO, b"dir")
    tree.unlink(ino, b"pipe")
    tree.rmdir(ROOT_INO, b"dir")


def test_attributes_go_with_their_owner(tree: Tree) -> None:
    ino = mkdir(tree, b"dir")
    Attributes(tree).set_xattr(ino, b"user.a", b"1")
    tree.rmdir(ROOT_INO, b"dir")
    assert tree.catalog.xattr_names(ino) == [b"user.a"]
    tree.ledger.removals.purge(ino)
    assert tree.catalog.xattr_names(ino) == []


# Renaming


@pytest.mark.parametrize("flags", [3, 4, 8, 1 << 31])
def test_other_flags_are_refused(tree: Tree, flags: int) -> None:
    fifo(tree, b"a")
    with pytest.raises(InvalidError):
        Renames(tree).rename(ROOT_INO, b"a", ROOT_INO, b"b", flags)


def test_a_full_directory_moves_with_all_that_is_in_it(tree: Tree) -> None:
    one, two = mkdir(tree, b"one"), mkdir(tree, b"two")
    sub = mkdir(tree, b"sub", one)
    pipe = fifo(tree, b"pipe", sub)
    Renames(tree).rename(one, b"sub", two, b"moved", 0)
    assert tree.lookup(two, b"moved").ino == sub
    assert tree.lookup(sub, b"..").ino == two
    assert tree.lookup(sub, b"pipe").ino == pipe
    assert names(tree, one) == []


def test_a_directory_does_not_move_into_itself(tree: Tree) -> None:
    one = mkdir(tree, b"one")
    two = mkdir(tree, b"two", one)
    for parent in (one, two):
        for flags in (0, RENAME_NOREPLACE):
            with pytest.raises(InvalidError):
                Renames(tree).rename(ROOT_INO, b"one", parent, b"x", flags)
    for arguments in ((ROOT_INO, b"one", one, b"two"), (one, b"two", ROOT_INO, b"one")):
        with pytest.raises(InvalidError):
            Renames(tree).rename(*arguments, RENAME_EXCHANGE)
    with pytest.raises(NotEmptyError):
        Renames(tree).rename(one, b"two", ROOT_INO, b"one", 0)


def test_replacing(tree: Tree) -> None:
    mkdir(tree, b"dir")
    empty, full = mkdir(tree, b"empty"), mkdir(tree, b"full")
    fifo(tree, b"pipe", full)
    pipe, other = fifo(tree, b"pipe"), fifo(tree, b"other")
    cases: list[tuple[bytes, bytes, type[KvfsError]]] = [
        (b"pipe", b"dir", IsADirError),
        (b"dir", b"pipe", NotADirError),
        (b"dir", b"full", NotEmptyError),
        (b"none", b"dir", NotFoundError),
        (b"pipe", b".", ExistsError),
        (b"pipe", b"..", ExistsError),
    ]
    for name, name2, error in cases:
        with pytest.raises(error):
            Renames(tree).rename(ROOT_INO, name, ROOT_INO, name2, 0)
    with pytest.raises(ExistsError):
        Renames(tree).rename(ROOT_INO, b"pipe", ROOT_INO, b"other", RENAME_NOREPLACE)
    Renames(tree).rename(ROOT_INO, b"pipe", ROOT_INO, b"other", 0)
    Renames(tree).rename(ROOT_INO, b"dir", ROOT_INO, b"empty", 0)
    assert tree.lookup(ROOT_INO, b"other").ino == pipe
    for gone in (other, empty):
        assert tree.inode(gone).nlink == 0
        tree.ledger.removals.purge(gone)
        with pytest.raises(StaleError):
            tree.inode(gone)
    assert sorted(names(tree)) == [b"empty", b"full", b"other"]


def test_two_names_of_one_file_stay(tree: Tree) -> None:
    ino = fifo(tree, b"a")
    tree.link(ino, ROOT_INO, b"b")
    Renames(tree).rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
    Renames(tree).rename(ROOT_INO, b"a", ROOT_INO, b"b", RENAME_EXCHANGE)
    Renames(tree).rename(ROOT_INO, b"a", ROOT_INO, b"a", 0)
    assert names(tree) == [b"a", b"b"]
    with pytest.raises(ExistsError):
        Renames(tree).rename(ROOT_INO, b"a", ROOT_INO, b"b", RENAME_NOREPLACE)


def test_exchange_across_directories(tree: Tree) -> None:
    one, two = mkdir(tree, b"one"), mkdir(tree, b"two")
    folder, pipe = mkdir(tree, b"x", one), fifo(tree, b"y", two)
    inner = fifo(tree, b"inner", folder)
    Renames(tree).rename(one, b"x", two, b"y", RENAME_EXCHANGE)
    assert tree.lookup(one, b"x").ino == pipe
    assert tree.lookup(two, b"y").ino == folder
    assert tree.lookup(folder, b"..").ino == two
    assert tree.lookup(folder, b"inner").ino == inner
    assert (tree.inode(one).nlink, tree.inode(two).nlink) == (2, 3)
    with pytest.raises(NotFoundError):
        Renames(tree).rename(one, b"x", two, b"none", RENAME_EXCHANGE)


def test_exchange_in_one_directory(tree: Tree) -> None:
    one, two = mkdir(tree, b"a"), fifo(tree, b"b")
    Renames(tree).rename(ROOT_INO, b"a", ROOT_INO, b"b", RENAME_EXCHANGE)
    assert (tree.lookup(ROOT_INO, b"a").ino, tree.lookup(ROOT_INO, b"b").ino) == (two, one)


# Reading


def test_reading_begins_with_dot_and_dotdot(tree: Tree) -> None:
    ino = mkdir(tree, b"dir")
    fifo(tree, b"a", ino)
    read = tree.list_entries(ino, 0, 10).entries
    assert [(name, inode.ino) for name, inode, _ in read[:2]] == [(b".", ino), (b"..", ROOT_INO)]
    assert [cookie for _, _, cookie in read[:2]] == [module.COOKIE_SELF, module.COOKIE_PARENT]
    for at, (_, _, cookie) in enumerate(read):
        assert tree.list_entries(ino, cookie, 10).entries == read[at + 1 :]


@pytest.mark.parametrize("seed", range(5))
def test_readdir_shows_a_lasting_name_once(tree: Tree, seed: int) -> None:
    dice = random.Random(seed)
    stay = [b"stay%d" % number for number in range(60)]
    for name in stay:
        fifo(tree, name)
    passing = [b"passing%d" % number for number in range(30)]
    seen: list[bytes] = []
    cookie = 0
    while found := tree.list_entries(ROOT_INO, cookie, dice.randrange(1, 9)).entries:
        seen += [name for name, _, _ in found]
        cookie = found[-1][2]
        name = dice.choice(passing)
        if tree.catalog.lookup(ROOT_INO, name):
            tree.unlink(ROOT_INO, name)
        else:
            fifo(tree, name)
        if len(seen) > 500:
            break
    assert [name for name in seen if name in stay] == stay


def test_cookies_are_stable(tree: Tree) -> None:
    for number in range(20):
        fifo(tree, b"%d" % number)
    before = {name: cookie for name, _, cookie in tree.list_entries(ROOT_INO, 0, 100).entries}
    for number in range(0, 20, 2):
        tree.unlink(ROOT_INO, b"%d" % number)
    after = {name: cookie for name, _, cookie in tree.list_entries(ROOT_INO, 0, 100).entries}
    assert after.items() <= before.items()


# Attributes


def test_times_follow_changes(tree: Tree) -> None:
    ino = mkdir(tree, b"dir")
    before = tree.inode(ino)
    pipe = fifo(tree, b"a", ino)
    after = tree.inode(ino)
    assert after.mtime_ns == after.ctime_ns > before.mtime_ns
    changed = Attributes(tree).change(pipe, mode=0o7777, uid=1, gid=2, atime_ns=-5, mtime_ns=6)
    assert changed == tree.inode(pipe)
    assert changed.mode == stat.S_IFIFO | 0o7777
    assert (changed.uid, changed.gid, changed.atime_ns, changed.mtime_ns) == (1, 2, -5, 6)
    assert changed.ctime_ns > after.ctime_ns


def use(tree: Tree, inodes: list[Inode]) -> list[Inode]:
    """As at an open; those whose time of access was noted."""
    now = tree.now()
    unused = tree.namespaces.unused(inodes, now)
    with tree.catalog.batch() as batch:
        for inode in unused:
            inode.atime_ns = now
            batch.put(inode)
    return unused


def test_an_access_is_noted_as_relatime_does(tree: Tree) -> None:
    ino = fifo(tree, b"a")
    use(tree, [tree.inode(ino)])
    first = tree.inode(ino).atime_ns
    assert first > tree.inode(ino).mtime_ns
    use(tree, [tree.inode(ino)])
    assert tree.inode(ino).atime_ns == first
    clock = tree.now
    assert isinstance(clock, Clock)
    clock.now += 2 * ATIME_STEP
    use(tree, [tree.inode(ino)])
    assert tree.inode(ino).atime_ns > first


def test_an_access_is_noted_of_those_that_are_old_enough(tree: Tree) -> None:
    inodes = [tree.inode(fifo(tree, name)) for name in (b"a", b"b", b"c")]
    assert use(tree, inodes[:1]) == inodes[:1]
    assert use(tree, inodes) == inodes[1:]
    assert use(tree, inodes) == []
    assert all(tree.inode(one.ino).atime_ns == one.atime_ns > one.mtime_ns for one in inodes)


def test_extended_attributes(tree: Tree) -> None:
    ino = mkdir(tree, b"dir")
    for name, value in ((b"user.\xff", b""), (b"trusted.b", b"\0"), (b"security.c", b"x" * 65536)):
        Attributes(tree).set_xattr(ino, name, value)
        assert Attributes(tree).xattr(ino, name) == value
    Attributes(tree).set_xattr(ino, b"trusted.b", b"new")
    assert Attributes(tree).xattr(ino, b"trusted.b") == b"new"
    assert sorted(tree.catalog.xattr_names(ino)) == [b"security.c", b"trusted.b", b"user.\xff"]
    Attributes(tree).remove_xattr(ino, b"trusted.b")
    for call in (Attributes(tree).xattr, Attributes(tree).remove_xattr):
        with pytest.raises(NoAttributeError):
            call(ino, b"trusted.b")


def test_extended_attributes_are_bounded(tree: Tree) -> None:
    ino = mkdir(tree, b"dir")
    refused: list[tuple[bytes, bytes, type[KvfsError]]] = [
        (b"system.posix_acl_access", b"", UnsupportedError),
        (b"nonsense", b"", UnsupportedError),
        (b"user." + b"x" * 251, b"", InvalidError),
        (b"user.a", b"x" * 65537, AttributeTooLargeError),
    ]
    for name, value, error in refused:
        with pytest.raises(error):
            Attributes(tree).set_xattr(ino, name, value)
    many = [b"user." + b"%03d" % number + b"x" * 247 for number in range(256)]
    for name in many:
        Attributes(tree).set_xattr(ino, name, b"")
    with pytest.raises(AttributeTooLargeError):
        Attributes(tree).set_xattr(ino, b"user.one more", b"")
    Attributes(tree).set_xattr(ino, many[0], b"an old one may change")
    Attributes(tree).remove_xattr(ino, many[0])
    Attributes(tree).set_xattr(ino, many[0], b"")


# Against the file system below


@pytest.mark.parametrize("seed", range(8))
def test_a_random_walk_is_as_the_real_thing(tree: Tree, tmp_path: Path, seed: int) -> None:
    """The same calls on kvfs and on this directory end in the same errno and the same tree."""
    dice = random.Random(seed)
    real = tmp_path / "real"
    real.mkdir()
    paths = [(), (b"a",), (b"b",), (b"a", b"c"), (b"b", b"d"), (b"a", b"c", b"e")]

    def where(folder: tuple[bytes, ...]) -> int:
        ino = ROOT_INO
        for name in folder:
            ino = tree.directory(tree.lookup(ino, name).ino).ino
        return ino

    def below(folder: tuple[bytes, ...], name: bytes) -> bytes:
        return b"/".join((os.fsencode(real), *folder, name))

    def outcome(call: Callable[[], object]) -> int:
        try:
            call()
        except KvfsError as error:
            return errno_of(error)
        except OSError as error:
            return error.errno or 0
        return 0

    def step(kind: str, one: Names, name: bytes, two: Names, name2: bytes) -> tuple[int, int]:
        """Do a step in kvfs and in the file system below; return both results as errnos."""
        ours: dict[str, Callable[[], object]] = {
            "mkdir": lambda: mkdir(tree, name, where(one)),
            "mkfifo": lambda: fifo(tree, name, where(one)),
            "unlink": lambda: tree.unlink(where(one), name),
            "rmdir": lambda: tree.rmdir(where(one), name),
            "rename": lambda: Renames(tree).rename(where(one), name, where(two), name2, 0),
            "link": lambda: tree.link(tree.lookup(where(one), name).ino, where(two), name2),
        }
        paths = [below(one, name)] + [below(two, name2)] * (kind in {"rename", "link"})
        return outcome(ours[kind]), outcome(lambda: getattr(os, kind)(*paths))

    kinds = ["mkdir", "mkdir", "mkfifo", "unlink", "rmdir", "rename", "rename", "link"]
    letters = [b"a", b"b", b"c", b"d", b"e"]
    for _ in range(150):
        what = (
            dice.choice(kinds),
            dice.choice(paths),
            dice.choice(letters),
            dice.choice(paths),
            dice.choice(letters),
        )
        ours, theirs = step(*what)
        # Which of several reasons is told first is the kernel's own business.
        assert bool(ours) == bool(theirs), f"{what}: {ours} {theirs}"
        check(tree)

    def listed(ino: int) -> dict[bytes, object]:
        return {
            name: listed(inode.ino) if inode.is_dir else inode.nlink
            for name, inode, _ in tree.list_entries(ino, module.COOKIE_PARENT, 100).entries
        }

    def really(path: bytes) -> dict[bytes, object]:
        return {
            entry.name: really(entry.path)
            if entry.is_dir(follow_symlinks=False)
            else entry.stat().st_nlink
            for entry in os.scandir(path)
        }

    assert listed(ROOT_INO) == really(os.fsencode(real))

"""Which directories are complete, and the set of names in the C part."""

import random
from collections import Counter
from pathlib import Path

import pytest
import trio

from kvfs.core.ledger import absent_names
from kvfs.core.ledger.absent_names import MISSES, AbsentLookup, AbsentNames
from kvfs.fuse import _passthrough
from tests.unit.world import World, world


class Names:
    """A gate in this process, with room for so many names and directories."""

    def __init__(self, room: int = 10**6) -> None:
        self.room = room
        self.directories: set[int] = set()
        self.names: set[tuple[int, bytes]] = set()

    def complete(self, directory: int, *, complete: bool) -> bool:
        if not complete:
            self.directories.discard(directory)
        elif len(self.directories) < self.room:
            self.directories.add(directory)
        return not complete or directory in self.directories

    def set_name(self, directory: int, name: bytes, *, given: bool) -> bool:
        if not given:
            self.names.discard((directory, name))
        elif len(self.names) < self.room:
            self.names.add((directory, name))
        return not given or (directory, name) in self.names

    def forget_names(self) -> None:
        self.directories.clear()
        self.names.clear()

    def take_lookups(self) -> list[AbsentLookup]:
        return []

    def check(self, made: World) -> None:
        """Each name of a complete directory is here."""
        for directory in self.directories:
            for name in made.catalog.names(directory, b""):
                assert (directory, name) in self.names


def started(made: World, room: int = 10**6) -> tuple[AbsentNames, Names]:
    names = Names(room)
    made.ledger.absent_names.start(names)
    return made.ledger.absent_names, names


async def scanned(names: AbsentNames, directory: int) -> bool:
    """Miss often enough, let the scan run, and say whether the directory is complete."""
    for _ in range(MISSES):
        names.missed(directory)
    with trio.move_on_after(0.1):
        await names.run()
    return directory in names.complete


def test_a_made_directory_is_complete(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        absent, names = started(made)
        folder = made.mkdir(b"d")
        assert folder.ino in names.directories
        inner = made.mkdir(b"d/e")
        made.tree.link(trio.run(made.make_file, b"d/a", b"content").ino, inner.ino, b"b")
        assert names.names >= {(folder.ino, b"e"), (folder.ino, b"a"), (inner.ino, b"b")}
        made.tree.unlink(folder.ino, b"a")
        assert (folder.ino, b"a") not in names.names
        names.check(made)
        absent.stop()
        assert not names.directories


def test_a_directory_of_an_earlier_mount_is_scanned(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        folder = made.mkdir(b"d")
        for number in range(1000):
            made.mkdir(b"d/%d" % number)
        absent, names = started(made)
        for _ in range(MISSES - 1):
            absent.missed(folder.ino)
        assert not absent.complete
        assert await scanned(absent, folder.ino)
        assert len(names.names) == 1000

    with world(tmp_path) as made:
        trio.run(case, made)


def test_a_failed_change_ends_a_complete_directory(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        absent, names = started(made)
        folder, other = made.mkdir(b"d"), made.mkdir(b"o")
        absent.changed([(folder.ino, b"a", True)], False)  # noqa: FBT003
        assert names.directories == {other.ino}
        assert absent.complete == {other.ino}


def test_a_full_gate_begins_anew(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        absent, names = started(made, room=5)
        for number in range(17):
            made.mkdir(b"%d" % number)
            assert absent.complete == names.directories
        first = made.at(b"16").ino
        assert first in names.directories
        for number in range(6):
            made.mkdir(b"16/%d" % number)
            names.check(made)
        assert first not in names.directories


def test_a_large_directory_is_not_scanned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(made: World) -> None:
        folder = made.mkdir(b"d")
        for number in range(20):
            made.mkdir(b"d/%d" % number)
        absent, names = started(made)
        assert not await scanned(absent, folder.ino)
        assert len(names.names) == 10
        assert not await scanned(absent, folder.ino)
        assert not names.directories

    monkeypatch.setattr(absent_names, "SCANNED_MAX", 10)
    with world(tmp_path) as made:
        trio.run(case, made)


def test_the_set_of_names_has_what_was_added() -> None:
    """Its size is that of a set of Python after each step, so no gap hides a name."""
    seed = random.randrange(10**6)
    print("seed", seed)
    choose, model = random.Random(seed), set[tuple[int, bytes]]()
    _passthrough.lookup_on(False)  # noqa: FBT003
    _passthrough.lookup_forget()
    known = Counter[bool]()
    for _ in range(30_000):
        directory, name = choose.randrange(3), b"%d" % choose.randrange(3000)
        given = choose.random() < 0.6
        assert _passthrough.lookup_name(directory, name, given)
        (model.add if given else model.discard)((directory, name))
        known[given] += 1
        assert _passthrough.lookup_state()[1] == len(model)
    assert min(known.values()) > 1000
    for directory, name in model:
        assert _passthrough.lookup_name(directory, name, False)  # noqa: FBT003
    assert _passthrough.lookup_state()[1] == 0
    assert _passthrough.lookup_complete(7, True)  # noqa: FBT003
    assert _passthrough.lookup_state()[0] == 1
    _passthrough.lookup_forget()
    assert _passthrough.lookup_state() == (0, 0)

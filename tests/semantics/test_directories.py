import errno
import os
import random
import stat
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.semantics.syscalls import RENAME_EXCHANGE, Listing, opened, refused, renameat2

MANY = 1200
# Names know nothing of tiers.
pytestmark = pytest.mark.parametrize("shared", ["kernel", "daemon"], indirect=True, scope="session")


def test_listing(here: Path) -> None:
    (here / "file").touch()
    os.mkdir(here / "dir")
    os.symlink("x", here / "link")
    os.mkfifo(here / "fifo")
    with os.scandir(here) as entries:
        found = list(entries)
    assert [entry.name for entry in found] == ["file", "dir", "link", "fifo"]
    assert [entry.inode() for entry in found] == [
        os.lstat(here / entry.name).st_ino for entry in found
    ]
    kinds = [entry.is_file() for entry in found], [entry.is_dir() for entry in found]
    assert kinds == ([True, False, False, False], [False, True, False, False])
    listing = Listing(here, dots=True)
    try:
        assert next(listing) == b"."
        assert next(listing) == b".."
    finally:
        listing.close()


def test_listing_while_changing(here: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    names = [f"{number:04}" for number in range(MANY)]
    for name in names:
        (here / name).touch()
    staying, going = set(names[::3]), dice.sample(names[1::3] + names[2::3], k=2 * MANY // 3)
    seen = []
    with os.scandir(here) as entries:
        for count, entry in enumerate(entries):
            seen.append(entry.name)
            if count % 2:
                (here / f"new{count}").touch()
            if going:
                os.unlink(here / going.pop())
            if count % 50 == 0:
                (here / "tmp").touch()
                os.rename(here / "tmp", here / dice.choice(names[::3]))
            if count % 70 == 0:
                renameat2(here / names[0], here / names[MANY - 3], RENAME_EXCHANGE)
    assert len(seen) == len(set(seen))
    assert staying <= set(seen)


def test_telldir(here: Path) -> None:
    names = [f"{number:04}" for number in range(MANY)]
    for name in names:
        (here / name).touch()
    listing = Listing(here)
    try:
        seen = [next(listing).decode() for _ in range(600)]
        place = listing.tell()
        rest = [name.decode() for name in listing]
        assert seen + rest == names
        for name in names[590:610]:
            os.unlink(here / name)
        (here / "later").touch()
        listing.seek(place)
        assert [name.decode() for name in listing] == [*names[610:], "later"]
        listing.seek(0)
        assert len(list(listing)) == MANY - 20 + 1
    finally:
        listing.close()


def test_remove_while_listing(here: Path) -> None:
    for number in range(MANY):
        (here / str(number)).touch()
    with os.scandir(here) as entries:
        for entry in entries:
            os.unlink(entry.path)
    assert os.listdir(here) == []


def test_dots(here: Path) -> None:
    os.makedirs(here / "a" / "b")
    assert os.stat(here / "a" / ".").st_ino == os.stat(here / "a").st_ino
    assert os.stat(here / "a" / "b" / "..").st_ino == os.stat(here / "a").st_ino
    with refused(errno.EEXIST):
        os.mkdir(f"{here}/a/.")
    with refused(errno.EINVAL):
        os.rmdir(f"{here}/a/.")
    with refused(errno.ENOTEMPTY):
        os.rmdir(f"{here}/a/b/..")
    for names in ((".", "x"), ("b", "..")):
        with refused(errno.EBUSY):
            os.rename(f"{here}/a/{names[0]}", f"{here}/a/{names[1]}")


def test_names(here: Path) -> None:
    every = bytes(byte for byte in range(1, 256) if byte != ord("/"))
    names = [bytes([byte]) for byte in every if byte != ord(".")]
    names += [every, every[::-1], b"n" * 255, b"\xff" * 255, b" ", b"\n", b"...", b"-rf", b"\xc3"]
    folder = os.fsencode(here)
    for name in set(names):
        with opened(Path(os.fsdecode(folder + b"/" + name)), os.O_CREAT | os.O_WRONLY) as new:
            os.write(new, name)
    assert set(os.listdir(folder)) == set(names)
    for name in set(names):
        with open(folder + b"/" + name, "rb") as file:
            assert file.read() == name
    long = here / ("n" * 256)
    with refused(errno.ENAMETOOLONG):
        os.stat(long)
    with refused(errno.ENAMETOOLONG):
        os.open(long, os.O_CREAT | os.O_WRONLY)
    with refused(errno.ENAMETOOLONG):
        os.mkdir(long)
    with refused(errno.ENAMETOOLONG):
        os.unlink(long)
    with refused(errno.ENAMETOOLONG):
        os.rename(here / "...", long)
    with refused(errno.ENAMETOOLONG):
        os.link(here / "...", long)
    with refused(errno.ENAMETOOLONG):
        os.symlink("x", long)
    assert stat.S_ISREG(os.stat(here / "...").st_mode)


def test_mkdir_races(here: Path) -> None:
    (here / "file").touch()
    os.mkdir(here / "d")
    for path, code in (
        ("d", errno.EEXIST),
        ("file", errno.EEXIST),
        ("x/y", errno.ENOENT),
        ("file/y", errno.ENOTDIR),
    ):
        with refused(code):
            os.mkdir(here / path)
    chains = [str(here / "p" / str(number) / "q" / "r") for number in range(20)]
    with ProcessPoolExecutor(4) as pool:
        for future in [pool.submit(_make_all, chains) for _ in range(4)]:
            future.result()
    assert all(map(os.path.isdir, chains))


def _make_all(paths: list[str]) -> None:
    for path in paths:
        os.makedirs(path, exist_ok=True)

"""Lookups of absent names that are answered beside the daemon's loop; never of present ones."""

import errno
import os
import random
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mount
from tests.harness import KVFS, Mounted, wait_for

OPTIONS = "ram=64M,nvme={tmp}/nvme,nvme_size=256M"
MISSES = 32  # of absent names, after which a directory of an earlier mount is scanned


@pytest.fixture
def kv(mount: Mount) -> Mounted:
    found = mount(OPTIONS)
    wait_for(lambda: found.status()["fast_open"]["on"], "opens are fast")
    return found


def run_kvfs(*words: str | Path) -> None:
    subprocess.run([*KVFS, *map(str, words)], check=True, capture_output=True)


def fast(kv: Mounted) -> int:
    return kv.counter("lookups_fast")


def absent(path: Path) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    return False


def complete(kv: Mounted, directory: Path) -> None:
    """Look up absent names until the daemon has scanned the directory."""

    def is_fast() -> bool:
        before = fast(kv)
        for number in range(MISSES):
            assert absent(directory / f"absent-{number}")
        return fast(kv) >= before + MISSES

    wait_for(is_fast, "lookups of absent names are fast")


def test_lookup_of_an_absent_name_does_not_enter_the_loop(kv: Mounted) -> None:
    folder = kv.path / "new"
    folder.mkdir()
    before = fast(kv)
    for _ in range(3):
        assert absent(folder / "block")
    (folder / "block").write_bytes(b"content")  # its own lookup is the fourth
    assert not absent(folder / "block")
    assert fast(kv) == before + 4
    (folder / "block").unlink()
    assert absent(folder / "block")
    assert fast(kv) == before + 5
    assert kv.status()["errors"]["lookup"]["NotFoundError"] >= 5


def test_a_name_too_long_is_no_absent_name(kv: Mounted) -> None:
    (kv.path / "new").mkdir()
    with pytest.raises(OSError, match="too long") as caught:
        os.stat(kv.path / "new" / ("n" * 256))
    assert caught.value.errno == errno.ENAMETOOLONG
    assert absent(kv.path / "new" / ("n" * 255))


def _create(path: Path, _other: Path) -> None:
    path.touch()


def _mkdir(path: Path, _other: Path) -> None:
    path.mkdir()


def _symlink(path: Path, _other: Path) -> None:
    path.symlink_to("anywhere")


def _link(path: Path, other: Path) -> None:
    path.hardlink_to(other)


def _fifo(path: Path, _other: Path) -> None:
    os.mkfifo(path)


def _rename(path: Path, other: Path) -> None:
    other.rename(path)


WAYS = [_create, _mkdir, _symlink, _link, _fifo, _rename]


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_a_name_is_found_however_it_came(
    kv: Mounted, way: Callable[[Path, Path], None], *, scanned: bool
) -> None:
    folder, elsewhere = kv.path / "new", kv.path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    if scanned:
        (folder / "before").touch()
        kv.remount()
        complete(kv, folder)
        assert not absent(folder / "before")
    (elsewhere / "other").write_bytes(b"content")
    before = fast(kv)
    assert absent(folder / "name")
    way(folder / "name", elsewhere / "other")
    assert fast(kv) > before
    assert not absent(folder / "name")
    assert os.listdir(folder) == (["before", "name"] if scanned else ["name"])
    (folder / "name").rename(folder / "again")
    assert absent(folder / "name")
    assert not absent(folder / "again")
    if way is _mkdir:
        (folder / "again").rmdir()
    else:
        (folder / "again").unlink()
    assert absent(folder / "again")


def test_virtual_files_are_found_at_the_top(kv: Mounted) -> None:
    complete(kv, kv.path)
    before = fast(kv)
    assert (kv.path / ".kvfs").is_dir()
    assert os.listdir(kv.path / ".kvfs")
    assert fast(kv) == before
    run_kvfs("ns", "create", kv.path / "space", "publish=close")
    assert (kv.path / "space").is_dir()


def test_a_name_that_comes_at_the_close_is_found(kv: Mounted) -> None:
    run_kvfs("ns", "create", kv.path / "space", "publish=close")
    folder = kv.path / "space" / "new"
    folder.mkdir()
    for number in range(20):
        path = folder / str(number)
        with path.open("wb") as file:
            file.write(b"content")
            assert absent(path)
        assert not absent(path)
    assert fast(kv) >= 20


def test_a_dropped_file_is_absent(kv: Mounted) -> None:
    folder = kv.path / "new"
    folder.mkdir()
    (folder / "name").write_bytes(b"content")
    run_kvfs("evict", "--drop", folder)
    wait_for(lambda: absent(folder / "name"), "it is dropped")
    (folder / "name").write_bytes(b"again")
    assert (folder / "name").read_bytes() == b"again"


def test_a_directory_is_scanned_while_names_come_and_go(kv: Mounted) -> None:
    folder = kv.path / "old"
    folder.mkdir()
    names = {f"before-{number}" for number in range(3000)}
    for name in names:
        (folder / name).touch()
    kv.remount()
    over = threading.Event()
    made: list[str] = []

    def make() -> None:
        while not over.is_set():
            name = f"made-{len(made)}"
            (folder / name).touch()
            assert not absent(folder / name)
            made.append(name)

    maker = threading.Thread(target=make)
    maker.start()
    try:
        complete(kv, folder)
    finally:
        over.set()
        maker.join()
    assert made
    assert not [name for name in [*names, *made] if absent(folder / name)]


def test_the_access_log_has_each_lookup(kv: Mounted, tmp_path: Path) -> None:
    folder, log = kv.path / "new", tmp_path / "accesses"
    folder.mkdir()
    assert absent(folder / "before")
    assert fast(kv) == 1
    run_kvfs("set", kv.path, f"access_log={log}")
    assert absent(folder / "during")
    assert fast(kv) == 1
    run_kvfs("set", kv.path, "access_log=none")
    wait_for(lambda: absent(folder / "after") and fast(kv) > 1, "lookups are fast again")
    assert "during" in log.read_text()


def test_no_lookups_are_fast_without_fast_opens(mount: Mount) -> None:
    kv = mount(f"{OPTIONS},fast_open=off")
    (kv.path / "new").mkdir()
    assert absent(kv.path / "new" / "name")
    assert fast(kv) == 0


def test_names_are_those_of_a_model(kv: Mounted) -> None:
    """Random changes of names, deaths of the daemon and lookups, against sets."""
    seed = random.randrange(10**6)
    print("seed", seed)
    choose = random.Random(seed)
    folders = [kv.path / name for name in "xyz"]
    model: dict[Path, set[str]] = {folder: set() for folder in folders}
    for folder in folders:
        folder.mkdir()
    for step in range(1500):
        folder, name = choose.choice(folders), str(choose.randrange(30))
        to, other = choose.choice(folders), str(choose.randrange(30))
        what = choose.choice(["look"] * 6 + ["make"] * 2 + ["unlink", "rename"])
        if what == "make":
            (folder / name).touch()
            model[folder].add(name)
        elif what == "unlink" and name in model[folder]:
            (folder / name).unlink()
            model[folder].remove(name)
        elif what == "rename" and name in model[folder]:
            (folder / name).rename(to / other)
            model[folder].remove(name)
            model[to].add(other)
        assert absent(folder / name) == (name not in model[folder]), (step, what)
        if step % 500 == 250:
            kv.kill_daemon()
            wait_for(lambda: kv.status()["fast_open"]["on"], "opens are fast again")
    assert fast(kv) > 0
    for folder in folders:
        assert set(os.listdir(folder)) == model[folder]

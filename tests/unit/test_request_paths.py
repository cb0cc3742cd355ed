"""How long the way of a request is: the modules that it enters, and how often it measures."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import cast

import pytest
import trio

from kvfs.catalog import ROOT_INO, keys
from tests.unit.test_bandwidth import Caller, Requests
from tests.unit.world import World, world

import kvfs.fuse.passthrough  # isort: skip
import pyfuse3  # isort: skip
from kvfs.fuse import operations  # isort: skip

ROOT = Path(kvfs.__file__).parent
MOST = 12  # modules; no change may make it more
CALLER = cast("pyfuse3.RequestContext", Caller())


@contextmanager
def entered() -> Iterator[set[str]]:
    """The modules of kvfs in which a function is called meanwhile."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            found.add(str(path.relative_to(ROOT)))

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def mounted(made: World) -> operations.Operations:
    kernel = cast("operations.FuseKernel", Requests())
    return operations.Operations(
        made.tree, made.objects, made.lifecycle, kernel, slots=10, timeout=1.0
    )


def test_an_open_of_a_resident_object_enters_few_modules(tmp_path: Path) -> None:
    async def case(made: World) -> None:
        inode = await made.store(b"a", b"bytes", made.fast)
        served = mounted(made)
        await served.release((await served.open(inode.ino, os.O_RDONLY, CALLER)).fh)
        with entered() as found:
            handle = (await served.open(inode.ino, os.O_RDONLY, CALLER)).fh
        await served.flush(handle)
        await served.release(handle)
        assert "core/objects/objects.py" in found
        print(*sorted(found), sep="\n")
        assert len(found) <= MOST, sorted(found)

    with world(tmp_path, passthrough=True) as made:
        trio.run(case, made)


def test_a_create_reads_no_record_of_its_directory_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case(made: World) -> None:
        served = mounted(made)
        parent, database = made.mkdir(b"d"), made.catalog.database
        get, read = database.get, list[bytes]()

        def counted(key: bytes) -> bytes | None:
            read.append(key)
            return get(key)

        monkeypatch.setattr(database, "get", counted)
        how = os.O_CREAT | os.O_WRONLY
        info, _ = await served.create(parent.ino, b"a", 0o644, how, CALLER)
        await served.release(info.fh)
        read.clear()
        info, _ = await served.create(parent.ino, b"b", 0o644, how, CALLER)
        print(read)
        assert keys.INODES + keys.number_key(parent.ino) not in read
        assert len(read) == len(set(read)), "nor is anything else read twice"
        await served.release(info.fh)

    with world(tmp_path) as made:
        trio.run(case, made)


def test_each_half_of_a_close_measures_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLUSH and RELEASE: a duplicate of the descriptor may write between them."""
    measured: list[int] = []

    async def case(made: World) -> None:
        served = mounted(made)
        info, _ = await served.create(ROOT_INO, b"a", 0o644, os.O_CREAT | os.O_WRONLY, CALLER)
        await served.write(info.fh, 0, b"bytes")
        measure: Callable[..., None] = made.files.measure

        def counted(held: object) -> None:
            measured.append(1)
            measure(held)

        monkeypatch.setattr(made.files, "measure", counted)
        await served.flush(info.fh)
        assert len(measured) == 1
        await served.release(info.fh)
        assert len(measured) == 2
        assert made.find(b"a").size == 5

    with world(tmp_path) as made:
        trio.run(case, made)

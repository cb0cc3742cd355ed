"""Every domain error has its errno, in one table."""

import errno
import inspect
import os
from pathlib import Path

import pytest
import trio

from kvfs import errors
from kvfs.catalog import ROOT_INO
from kvfs.errors import KvfsError, NoSpaceError
from kvfs.fuse.errnos import ERRNO, errno_of
from kvfs.movement.movers import MoverFailedError
from tests.unit.test_request_paths import CALLER, mounted
from tests.unit.world import World, world

import pyfuse3  # isort: skip

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, KvfsError) and cls is not KvfsError
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_is_in_the_table(cls: type[KvfsError]) -> None:
    assert cls in ERRNO
    assert errno_of(cls("why")) == ERRNO[cls]


def test_the_table_has_nothing_else() -> None:
    assert set(ERRNO) == set(CLASSES)
    assert all(code in errno.errorcode for code in ERRNO.values())


@pytest.mark.parametrize("cls", CLASSES)
def test_a_subclass_is_its_nearest_parent(cls: type[KvfsError]) -> None:
    child = type("Child", (cls,), {})
    grandchild = type("Grandchild", (child,), {})
    assert errno_of(grandchild("why")) == ERRNO[cls]


def test_errors_of_other_layers_are_of_a_kind_in_the_table() -> None:
    assert errno_of(MoverFailedError("dead")) == errno.EIO


def test_the_root_alone_is_an_input_output_error() -> None:
    assert errno_of(KvfsError("what?")) == errno.EIO


@pytest.mark.parametrize("cls", [KvfsError, *CLASSES])
def test_every_error_has_a_docstring(cls: type[KvfsError]) -> None:
    assert cls.__doc__


def test_the_log_names_the_object_of_an_operation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def case(made: World) -> None:
        served, parent = mounted(made), made.mkdir(b"d").ino
        info, entry = await served.create(parent, b"a", 0o644, os.O_CREAT | os.O_RDWR, CALLER)
        failing = [
            (served.lookup(parent, b"b", CALLER), "lookup('d', b'b', "),
            (served.getxattr(entry.st_ino, b"user.x", CALLER), "getxattr('d/a', b'user.x', "),
            (served.setxattr(ROOT_INO, b"user.kvfs.x", b"", CALLER), "setxattr(the mount point, "),
            (served.write(info.fh, 0, b"more"), "write('d/a', 0, <4 bytes>): "),
            (served.getattr(999, CALLER), "getattr(an unlinked object (inode 999), "),
        ]
        made.ledger.table.open[entry.st_ino].doom = NoSpaceError("there is no room")
        for call, text in failing:
            caplog.clear()
            with pytest.raises(pyfuse3.FUSEError):
                await call
            assert text in caplog.text
        made.ledger.table.open[entry.st_ino].doom = None
        await served.release(info.fh)

    with caplog.at_level("DEBUG", "kvfs.fuse.operations"), world(tmp_path) as made:
        trio.run(case, made)


def test_the_documentation_of_metrics_has_the_errno_of_each_class() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    before_a_mount = (errors.ConfigError, errors.ControlError)
    for one, number in ERRNO.items():
        row = f"| `{one.__name__}` | {errno.errorcode[number]} |".replace("ENOTSUP ", "EOPNOTSUPP ")
        assert issubclass(one, before_a_mount) != (row in text), row

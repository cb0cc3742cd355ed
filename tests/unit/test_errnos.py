"""Every domain error has its errno, in one table."""

import errno
import inspect

import pytest

from kvfs import errors
from kvfs.errors import KvfsError
from kvfs.fuse.errnos import ERRNO, errno_of
from kvfs.movement.movers import MoverFailedError

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

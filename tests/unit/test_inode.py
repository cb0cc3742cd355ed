"""The inode's record: what is packed comes back."""

import stat
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.catalog import LINK_MAX, Inode, PackedCopy
from kvfs.catalog.inode import SPARSE

U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
TIME = st.integers(-(1 << 63), (1 << 63) - 1)
INODES = st.builds(
    Inode,
    ino=U64,
    mode=U32,
    uid=U32,
    gid=U32,
    atime_ns=TIME,
    mtime_ns=TIME,
    ctime_ns=TIME,
    links=st.lists(st.tuples(U64, U64), max_size=5).map(tuple),
    size=U64,
    blocks=U64,
    rdev=U32,
    subdirs=U32,
    target=st.binary(max_size=50),
    version=U32,
    session=U32,
    sealed=st.booleans(),
    in_bucket=st.booleans(),
    ram_epoch=U32,
    on_nvme=st.booleans(),
    backing_mtime_ns=TIME,
    digest=st.one_of(
        st.just(b""),
        st.binary(min_size=16, max_size=16),
        st.binary(min_size=16, max_size=16).map(lambda digest: SPARSE + digest),
    ),
    packed=st.none()
    | st.builds(
        PackedCopy,
        codec=st.sampled_from(["blosc-zstd-s2/1", "another"]),
        size=U64,
        blocks=U64,
        digest=st.binary(min_size=16, max_size=16),
    ),
)


@given(INODES)
def test_a_record_comes_back_as_it_was(inode: Inode) -> None:
    assert Inode.unpack(inode.ino, inode.pack()) == inode


@given(INODES, INODES)
def test_every_field_is_taken_over(one: Inode, two: Inode) -> None:
    one.copy_from(two)
    assert one == two


def test_a_digest_of_zeros_is_a_digest() -> None:
    inode = file()
    inode.digest = bytes(16)
    assert Inode.unpack(1, inode.pack()).digest == bytes(16)


def test_all_names_that_a_file_may_have_fit() -> None:
    inode = file()
    inode.links = tuple((1, cookie) for cookie in range(LINK_MAX))
    assert Inode.unpack(1, inode.pack()).links == inode.links


def test_a_record_of_a_usual_file_is_small() -> None:
    """It is in every write of a batch, and 10^7 of them are in the catalog."""
    assert len(file().pack()) <= 160


def file(mode: int = stat.S_IFREG | 0o644) -> Inode:
    return Inode(
        ino=1,
        mode=mode,
        uid=0,
        gid=0,
        atime_ns=0,
        mtime_ns=0,
        ctime_ns=0,
        links=((1, 20),),
    )


@pytest.mark.parametrize(
    ("mode", "subdirs", "links", "nlink"),
    [
        (stat.S_IFREG, 0, ((1, 20),), 1),
        (stat.S_IFREG, 0, ((1, 20), (5, 21)), 2),
        (stat.S_IFREG, 0, (), 0),
        (stat.S_IFDIR, 0, ((1, 20),), 2),
        (stat.S_IFDIR, 3, ((1, 20),), 5),
        (stat.S_IFDIR, 0, (), 0),
        (stat.S_IFLNK, 0, ((1, 20),), 1),
    ],
)
def test_link_counts(
    mode: int, subdirs: int, links: tuple[tuple[int, int], ...], nlink: int
) -> None:
    inode = file(mode)
    inode.subdirs, inode.links = subdirs, links
    assert inode.nlink == nlink


def test_kinds() -> None:
    assert file().is_file
    assert not file().is_dir
    assert file(stat.S_IFDIR).is_dir
    assert not any(
        (file(kind).is_file or file(kind).is_dir) for kind in (stat.S_IFLNK, stat.S_IFIFO)
    )


def test_a_record_has_no_dict() -> None:
    """Thousands are alive while a directory is read."""
    assert not hasattr(file(), "__dict__")
    assert {f.name for f in fields(Inode)} >= {"ino", "links"}

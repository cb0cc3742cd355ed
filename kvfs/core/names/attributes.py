"""Attributes of inodes: mode, owner, times and extended attributes.

Contract: every method is synchronous and one catalog batch. The kernel checks permissions
(default_permissions). Not for size, nor for the settings of namespaces that look like attributes.
"""

import stat

from kvfs.catalog import Inode
from kvfs.core.names.tree import NAME_MAX, Tree
from kvfs.errors import (
    AttributeTooLargeError,
    InvalidError,
    NoAttributeError,
    UnsupportedError,
)

XATTR_VALUE_MAX = 64 << 10  # XATTR_SIZE_MAX of Linux
XATTR_NAMES_MAX = 64 << 10  # XATTR_LIST_MAX
XATTR_VALUES_MAX = 1 << 20  # bytes of one inode: they fill the catalog, and no quota counts them


class Attributes:
    """The attributes of the inodes of a tree."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.catalog = tree.catalog

    def change(
        self,
        ino: int,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
    ) -> Inode:
        inode = self.tree.inode(ino)
        with self.catalog.batch() as batch:
            batch.change(inode)
            if mode is not None:
                inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)
            elif not stat.S_ISDIR(inode.mode) and (uid is not None or gid is not None):
                inode.mode &= ~stat.S_ISUID  # a new owner has not granted them
                if inode.mode & stat.S_IXGRP:
                    inode.mode &= ~stat.S_ISGID
            if uid is not None:
                inode.uid = uid
            if gid is not None:
                inode.gid = gid
            if atime_ns is not None:
                inode.atime_ns = atime_ns
            if mtime_ns is not None:
                inode.mtime_ns = mtime_ns
            inode.ctime_ns = self.tree.now()
            self.tree.ledger.dirty.on_new_attributes(inode, batch)
            batch.put(inode)
        return inode

    def xattr(self, ino: int, name: bytes) -> bytes:
        value = self.catalog.xattr(ino, name)
        if value is None:
            raise NoAttributeError(f"no attribute {name!r}")
        return value

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        inode = self.tree.inode(ino)
        if not name.startswith((b"user.", b"trusted.", b"security.")):
            raise UnsupportedError(f"attribute {name!r}, expected user.*, trusted.* or security.*")
        if name == b"security.capability":  # and the C part answers that there is none
            raise UnsupportedError(
                "file capabilities: the mount is nosuid, they would mean nothing"
            )
        if len(name) > NAME_MAX:
            raise InvalidError(f"attribute name of {len(name)} bytes, at most {NAME_MAX}")
        if len(value) > XATTR_VALUE_MAX:
            raise AttributeTooLargeError(f"value of {len(value)} bytes, at most {XATTR_VALUE_MAX}")
        sizes = {**self.catalog.xattr_sizes(ino), name: len(value)}
        if sum(map(len, sizes)) + len(sizes) > XATTR_NAMES_MAX:
            raise AttributeTooLargeError(
                f"{self.catalog.named(ino)} has {len(sizes) - 1} attributes already"
            )
        if sum(sizes.values()) > XATTR_VALUES_MAX:
            raise AttributeTooLargeError(
                f"{self.catalog.named(ino)} would have {sum(sizes.values())} bytes in its "
                f"attributes, at most {XATTR_VALUES_MAX}"
            )
        inode.ctime_ns = self.tree.now()
        with self.catalog.batch() as batch:
            batch.set_xattr(ino, name, value)
            batch.put(inode)

    def remove_xattr(self, ino: int, name: bytes) -> None:
        self.xattr(ino, name)
        inode = self.tree.inode(ino)
        inode.ctime_ns = self.tree.now()
        with self.catalog.batch() as batch:
            batch.remove_xattr(ino, name)
            batch.put(inode)
            batch.answers()

"""Makes directories and namespaces that the bucket has only as prefixes of keys.

Contract: synchronous. A directory is made because something is below it, and never in place of
another file. It is made only where this mount's templates would make the same of its name. A
namespace gets the greatest version in the bucket. It is not made if a namespace of that name was
dropped here, or if one of its keys is about to go. If a name is no directory here, the objects
below it cannot be found. Not for objects: `core/bucket/listing/remote_entries.py`.
"""

import dataclasses
import stat
from collections.abc import Iterable
from typing import Literal, NamedTuple

from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.names.tree import Tree, is_name
from kvfs.s3.keys import KEY_MAX, ObjectName
from kvfs.settings import Settings
from kvfs.tiers import Bucket

DIRECTORY_MODE = 0o755  # of listed directories

# here: the name exists; absent: the bucket does not have it either; hidden: all keys below it in
# the bucket, as far as was asked, are ours and about to go; unsure: a change is under way
NameState = Literal["here", "absent", "hidden", "unsure"]


class EntryName(NamedTuple):
    """A name in a directory."""

    parent: int
    name: bytes


class RemoteDirectories:
    """The remote directories of one bucket; `prefix` is the start of the keys."""

    def __init__(self, tree: Tree, bucket: Bucket) -> None:
        self.tree = tree
        self.bucket = bucket
        self.ledger = tree.ledger
        self.namespaces = tree.namespaces
        self.catalog = tree.catalog
        self.superseded = tree.ledger.dirty.superseded
        self.keys = bucket.keys

    def directory(self, ino: int) -> Inode | None:
        """A directory that may have names of the bucket; else None."""
        found = self.ledger.table.inode(ino)
        if found is None or not found.is_dir or not found.links:
            return None
        if self.namespaces.is_dropped(found) or not self.namespaces.of(found).takes(self.bucket):
            return None
        return found

    def prefix(self, ino: int) -> str:
        """The start of the keys of the names in a directory; "" if there can be none."""
        directory = self.directory(ino)
        if directory is None:
            return ""
        called = self.namespaces.bucket_name(directory, b"x")
        if called is None:
            return ""
        found = self.keys.folder(*called[:2], called.path.rpartition(b"/")[0])
        return found if len(found) <= KEY_MAX else ""

    def make_directory(self, place: EntryName) -> Inode | None:
        """Make a directory, since something is below it; None if names or templates forbid it."""
        directory = self.directory(place.parent)
        if directory is None or not is_name(place.name, place.parent):
            return None
        if place.parent == ROOT_INO and self._template(place.name) is not None:
            return None  # here it would be a namespace, which has other keys
        mode = stat.S_IFDIR | DIRECTORY_MODE
        return self.tree.make(*place, mode, directory.uid, directory.gid)

    def make_namespace(self, name: bytes, version: int) -> Inode | None:
        """Make a namespace that has objects; None if its name or templates keep it out."""
        if not is_name(name, ROOT_INO):
            return None
        settings = dataclasses.replace(self._template(name) or Settings(), version=version)
        if settings.media and self.bucket.name not in settings.media:
            return None
        root = self.tree.directory(ROOT_INO)
        mode = stat.S_IFDIR | DIRECTORY_MODE
        return self.tree.make(ROOT_INO, name, mode, root.uid, root.gid, settings=settings)

    def _template(self, name: bytes) -> Settings | None:
        return self.tree.templates(name.decode("utf-8", "surrogateescape"))

    def enter_namespace(self, name: bytes, remote_directories: Iterable[str]) -> NameState:
        """Make a namespace in the greatest version that exists and is not about to be deleted."""
        found = [
            (one.version, folder)
            for folder in remote_directories
            if (one := self.keys.parse_folder(folder)) and (one.namespace, one.path) == (name, b"")
        ]
        if not found:
            return "absent"
        version, folder = max(found)
        dropped = self.namespaces.last_dropped(name.decode("utf-8", "surrogateescape"))
        if dropped or any(key.startswith(folder) for key in self.superseded.deletes):
            return "unsure"
        return "absent" if self.make_namespace(name, version) is None else "here"

    def reach(self, name: ObjectName) -> Inode | str:
        """The directory of an object, made where it does not exist yet; or the reason why not."""
        way = name.path.split(b"/")[:-1]
        at = ROOT_INO
        if name.namespace:
            entry = self.catalog.lookup(ROOT_INO, name.namespace)
            at = entry.ino if entry else 0
            own = self.namespaces.own(at)
            if own is None or own.settings.version != name.version:
                return "of a namespace, or a version of one, that is not here"
        elif way and self._is_namespace(way[0]):
            return "in a directory that is a namespace here"
        for part in way:
            entry = self.catalog.lookup(at, part)
            inode = (
                self.ledger.table.inode(entry.ino)
                if entry
                else self.make_directory(EntryName(at, part))
            )
            if inode is None or not inode.is_dir:
                return "below a name that is no directory here"
            at = inode.ino
        return self.directory(at) or "in a namespace that is not in the bucket here"

    def _is_namespace(self, name: bytes) -> bool:
        entry = self.catalog.lookup(ROOT_INO, name)
        return entry is not None and self.namespaces.own(entry.ino) is not None

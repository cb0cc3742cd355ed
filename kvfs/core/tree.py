"""Names: directories, links, renames, attributes that are not content.

Contract: every method is synchronous and is one catalog batch; what it checks still holds when it
commits. Permissions are the kernel's business (default_permissions). What is made or moved is
accounted to the namespace of its directory. Not for content, nor for what namespaces are told.
"""

import stat
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvfs.catalog import LINK_MAX, ROOT_INO, Batch, Catalog, Dentry, Inode
from kvfs.core.namespace import Namespace
from kvfs.core.residency import Residency
from kvfs.errors import (
    AttributeTooLargeError,
    ExistsError,
    InvalidError,
    IsADirError,
    NameTooLongError,
    NoAttributeError,
    NotADirError,
    NotEmptyError,
    NotFoundError,
    NotPermittedError,
    OtherNamespaceError,
    StaleError,
    TooManyLinksError,
    UnsupportedError,
)
from kvfs.settings import Settings
from kvfs.tiers import Tier

NAME_MAX = 255
TARGET_MAX = 4095
XATTR_VALUE_MAX = 64 << 10  # XATTR_SIZE_MAX of Linux
XATTR_NAMES_MAX = 64 << 10  # XATTR_LIST_MAX
COOKIE_SELF, COOKIE_PARENT = 1, 2
HIDDEN_STEP = 8  # entries that nobody finds, which a step of a listing drops in 30 to 100 us each
HIDDEN_MAX = 1000  # entries that an rmdir unlinks, some 30 ms
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2  # linux/fs.h


class Listing(NamedTuple):
    """Some of a directory: (name, inode, cookie) of each, behind which cookie to read on."""

    entries: list[tuple[bytes, Inode, int]]
    cookie: int
    ended: bool  # there is nothing behind it


class Tree:
    """`templates` says which settings a new top-level directory of a name gets, None for none."""

    def __init__(
        self,
        residency: Residency,
        *,
        templates: Callable[[str], Settings | None] = lambda _: None,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        self.residency = residency
        self.namespaces = residency.namespaces
        self.templates = templates
        self.catalog: Catalog = residency.catalog
        self.now = now

    def make_root(self, *, uid: int, gid: int) -> None:
        if self.catalog.inode(ROOT_INO) is None:
            inode = self.new(stat.S_IFDIR | 0o755, uid, gid)
            inode.ino = ROOT_INO
            inode.links = ((ROOT_INO, COOKIE_SELF),)
            with self.catalog.batch() as batch:
                batch.put(inode)

    def new(self, mode: int, uid: int, gid: int) -> Inode:
        """An inode without number and names."""
        now = self.now()
        return Inode(
            ino=0, mode=mode, uid=uid, gid=gid, atime_ns=now, mtime_ns=now, ctime_ns=now, links=()
        )

    # Looking

    def inode(self, ino: int) -> Inode:
        found = self.residency.inode(ino)
        if found is None:
            raise StaleError(f"inode {ino} is gone")
        return found

    def directory(self, ino: int) -> Inode:
        found = self.inode(ino)
        if not found.is_dir:
            raise NotADirError(f"inode {ino} is not a directory")
        return found

    def lookup(self, parent: int, name: bytes) -> Inode:
        """The inode of a name. Raises NotFoundError, also if its bytes went away with RAM."""
        _check_name(name)
        if name == b".":  # how NFS handles are resolved, also those of files
            found = self.inode(parent)
            if not found.links:
                raise StaleError(f"inode {parent} has no name any more")
            return found
        if name == b"..":
            return self._parent(self.directory(parent))
        entry = self.catalog.lookup(parent, name)
        if entry is None:  # also where the directory itself is gone, with somebody still inside
            raise NotFoundError(f"no {name!r} in directory {parent}")
        return self._living(entry)

    def _parent(self, directory: Inode) -> Inode:
        if not directory.links:
            raise NotFoundError(f"directory {directory.ino} was removed")
        return self.directory(directory.links[0][0])

    def _living(self, entry: Dentry) -> Inode:
        inode = self.inode(entry.ino)
        if self.residency.is_lost(inode):
            self.residency.drop(inode, "lost")
            raise NotFoundError(f"the bytes of {entry.name!r} went away with the RAM tier")
        if self.residency.is_gone(inode):
            raise NotFoundError(f"{entry.name!r} is expired, or its namespace was dropped")
        return inode

    def _entry(self, parent: int, name: bytes) -> tuple[Dentry, Inode] | None:
        """A name that really stands for something, with its inode."""
        _check_name(name)
        entry = self.catalog.lookup(parent, name)
        if entry is None:
            return None
        try:
            return entry, self._living(entry)
        except NotFoundError:
            return None

    def _expect(self, parent: int, name: bytes) -> tuple[Dentry, Inode]:
        found = self._entry(parent, name)
        if found is None:
            raise NotFoundError(f"no {name!r} in directory {parent}")
        return found

    def read(self, ino: int, cookie: int, limit: int, *, hidden: int = HIDDEN_STEP) -> Listing:
        """Up to `limit` entries behind a cookie; fewer at the end, or where many were passed by.

        `hidden` is how many: those that nobody finds any more, which are dropped if nobody has them
        open. So a step of a listing takes no longer than others may wait.
        An entry that is there all the time is seen once, whatever comes and goes meanwhile.
        """
        found: list[tuple[bytes, Inode, int]] = []
        directory = self.residency.inode(ino)
        if directory is None or not directory.links or self.namespaces.is_dropped(directory):
            return Listing(found, cookie, ended=True)  # removed while open
        if cookie < COOKIE_SELF:
            found.append((b".", directory, COOKIE_SELF))
        if cookie < COOKIE_PARENT:
            found.append((b"..", self._parent(directory), COOKIE_PARENT))
            cookie = COOKIE_PARENT
        while len(found) < limit:
            wanted = limit - len(found)
            entries = self.catalog.entries_after(ino, cookie, wanted)
            inodes = self.catalog.inodes([entry.ino for entry in entries])
            for entry, stored in zip(entries, inodes, strict=True):
                cookie = entry.cookie
                held = self.residency.open.get(entry.ino)
                inode = stored if held is None else held.inode
                if inode is not None and self._is_found(inode):
                    found.append((entry.name, inode, cookie))
                    continue
                hidden -= 1
                if not hidden:
                    return Listing(found, cookie, ended=False)
            if len(entries) < wanted:
                return Listing(found, cookie, ended=True)
        return Listing(found, cookie, ended=False)

    def _is_found(self, inode: Inode) -> bool:
        """Whether who looks for it finds it; if not it is dropped where it may be."""
        if self.residency.is_lost(inode):
            self.residency.drop(inode, "lost")
            return False
        return not self.residency.is_gone(inode)

    # Making

    def check_new(self, parent: int, name: bytes) -> Inode:
        """The directory that a new name may be made in."""
        directory = self._to_enter(parent)
        if name in {b".", b".."} or self._entry(parent, name) is not None:
            raise ExistsError(f"{name!r} exists in directory {parent}")
        return directory

    def _to_enter(self, ino: int) -> Inode:
        """The directory that a name may be given in."""
        if self.residency.inode(ino) is None:
            raise NotFoundError(f"directory {ino} is gone")
        directory = self.directory(ino)
        if not directory.links or self.namespaces.is_dropped(directory):
            raise NotFoundError(f"directory {ino} was removed")
        return directory

    def born(self, directory: Inode, mode: int, uid: int, gid: int) -> Inode:
        """A new inode as `directory` wants it: a setgid directory passes its group on.

        Its namespace may say who owns files, and their mode.
        """
        if directory.mode & stat.S_ISGID:
            gid = directory.gid
            if stat.S_ISDIR(mode):
                mode |= stat.S_ISGID
        wanted = self.namespaces.of(directory).settings
        if stat.S_ISREG(mode):
            mode = mode if wanted.mode is None else stat.S_IFREG | wanted.mode
            uid = uid if wanted.uid is None else wanted.uid
            gid = gid if wanted.gid is None else wanted.gid
        inode = self.new(mode, uid, gid)
        inode.namespace = directory.namespace
        return inode

    def make(
        self,
        parent: int,
        name: bytes,
        mode: int,
        uid: int,
        gid: int,
        *,
        rdev: int = 0,
        target: bytes = b"",
        settings: Settings | None = None,
    ) -> Inode:
        """A directory, symbolic link, fifo, socket or device node.

        settings: of a new top-level directory, whatever the templates say.
        """
        if len(target) > TARGET_MAX:
            raise NameTooLongError(f"link target of {len(target)} bytes, at most {TARGET_MAX}")
        directory = self.check_new(parent, name)
        inode = self.born(directory, mode, uid, gid)
        inode.ino = self.catalog.next_id()
        inode.links = ((parent, inode.ino),)
        inode.rdev, inode.target, inode.size = rdev, target, len(target)
        directory.subdirs += inode.is_dir
        with self.catalog.batch() as batch:
            if parent == ROOT_INO and inode.is_dir:
                settings = settings or self.templates(name.decode("utf-8", "surrogateescape"))
                if settings is not None:
                    inode.namespace = inode.ino
                    self.namespaces.set(inode.ino, settings, batch)
            batch.put(inode)
            batch.link(parent, Dentry(name, inode.ino, inode.ino))
            self._changed(directory, batch)
            batch.answers(inode.ino)
        return inode

    def link(self, ino: int, parent: int, name: bytes) -> Inode:
        inode = self.inode(ino)
        if inode.is_dir:
            raise NotPermittedError(f"inode {ino} is a directory: it can have one name only")
        if not inode.links:
            raise NotFoundError(f"inode {ino} has no name left to link to")
        if len(inode.links) >= LINK_MAX:
            raise TooManyLinksError(f"inode {ino} has {LINK_MAX} names, which is the most")
        directory = self.check_new(parent, name)
        if inode.namespace != directory.namespace:
            raise OtherNamespaceError(f"inode {ino} cannot have a name in another namespace")
        entry = Dentry(name, ino, self.catalog.next_id())
        inode.links = (*inode.links, (parent, entry.cookie))
        inode.ctime_ns = self.now()
        with self.catalog.batch() as batch:
            batch.put(inode)
            batch.link(parent, entry)
            self._changed(directory, batch)
            batch.answers(ino)
        return inode

    def _changed(self, directory: Inode, batch: Batch) -> None:
        directory.mtime_ns = directory.ctime_ns = self.now()
        batch.put(directory)

    # Removing

    def unlink(self, parent: int, name: bytes) -> None:
        directory = self.directory(parent)
        entry, inode = self._expect(parent, name)
        if inode.is_dir:
            raise IsADirError(f"{name!r} is a directory")
        with self.catalog.batch() as batch:
            self._unlink(parent, entry, inode, batch)
            self._changed(directory, batch)
            batch.answers()

    def _unlink(self, parent: int, entry: Dentry, inode: Inode, batch: Batch) -> None:
        """One name of a file less; with the last one it goes, at once or when it is closed."""
        batch.unlink(parent, entry)
        inode.links = tuple(link for link in inode.links if link != (parent, entry.cookie))
        inode.ctime_ns = self.now()
        if inode.links:
            batch.put(inode)
        elif inode.ino in self.residency.open:
            batch.put(inode)
            batch.mark_unfinished(inode.ino)
        elif not inode.is_file or self.residency.holders(inode):
            self.residency.to_limbo(inode, batch)
        else:
            self.residency.forget(inode, batch)

    def rmdir(self, parent: int, name: bytes) -> None:
        directory = self.directory(parent)
        if name == b".":
            raise InvalidError("'.' cannot be removed")
        if name == b"..":
            raise NotEmptyError("'..' cannot be removed")
        entry, inode = self._expect(parent, name)
        with self.catalog.batch() as batch:
            self._rmdir(directory, entry, inode, batch)
            self._changed(directory, batch)
            batch.answers()

    def _rmdir(self, directory: Inode, entry: Dentry, inode: Inode, batch: Batch) -> None:
        if not inode.is_dir:
            raise NotADirError(f"{entry.name!r} is not a directory")
        listed = self.read(inode.ino, COOKIE_PARENT, 1, hidden=HIDDEN_MAX + 1)
        if listed.entries:
            raise NotEmptyError(f"directory {entry.name!r} has entries")
        if not listed.ended:
            raise NotEmptyError(f"directory {entry.name!r} has entries that are yet to go")
        self._unlink_hidden(inode, batch)
        batch.unlink(directory.ino, entry)
        inode.links = ()
        inode.ctime_ns = self.now()
        self.residency.to_limbo(inode, batch)
        directory.subdirs -= 1
        if self.namespaces.own(inode.ino):
            self.namespaces.forget(inode.ino, batch)

    def _unlink_hidden(self, directory: Inode, batch: Batch) -> None:
        """Entries that nobody finds any more, but that are there: they go with their directory.

        Expired while they are open, or moved here from a namespace that was dropped since.
        """
        entries = self.catalog.entries_after(directory.ino, 0, HIDDEN_MAX + 1)
        inodes = {entry.ino: self.residency.inode(entry.ino) for entry in entries}
        for entry in entries:
            inode = inodes[entry.ino]
            if inode is None:
                batch.unlink(directory.ino, entry)
            elif inode.is_dir or len(entries) > HIDDEN_MAX:
                raise NotEmptyError(f"directory {directory.ino} has entries that are yet to go")
            else:
                self._unlink(directory.ino, entry, inode, batch)

    # Renaming

    def rename(self, parent: int, name: bytes, parent2: int, name2: bytes, flags: int) -> None:
        """rename(2) with RENAME_NOREPLACE or RENAME_EXCHANGE; other flags raise InvalidError."""
        move = self._check_rename(parent, name, parent2, name2, flags)
        source_dir, entry, inode, target_dir, target = move
        if target is not None and target[1].ino == inode.ino:
            return  # two names of one file: rename(2) does nothing
        if flags == RENAME_EXCHANGE and target is not None:
            self._exchange(source_dir, entry, inode, target_dir, *target)
            return
        with self.catalog.batch() as batch:
            if target is not None:
                self._replace(target_dir, *target, batch)
            batch.unlink(parent, entry)
            cookie = self.catalog.next_id() if target is None else target[0].cookie
            moved = Dentry(name2, inode.ino, cookie)
            self._move(inode, entry, source_dir, target_dir, moved, batch)
            self._changed(source_dir, batch)
            self._changed(target_dir, batch)
            batch.answers()

    def _check_rename(
        self, parent: int, name: bytes, parent2: int, name2: bytes, flags: int
    ) -> tuple[Inode, Dentry, Inode, Inode, tuple[Dentry, Inode] | None]:
        """The directory, entry and inode that are renamed, into which directory, over what."""
        if flags not in {0, RENAME_NOREPLACE, RENAME_EXCHANGE}:
            raise InvalidError(f"rename flags {flags}, expected NOREPLACE or EXCHANGE")
        source_dir = self.directory(parent)
        target_dir = source_dir if parent2 == parent else self._to_enter(parent2)
        if not target_dir.links:
            raise NotFoundError(f"directory {parent2} was removed")
        if name2 in {b".", b".."}:
            raise ExistsError(f"{name2!r} cannot be replaced")
        entry, inode = self._expect(parent, name)
        target = self._entry(parent2, name2)
        if inode.is_dir:
            self._check_descent(inode.ino, parent2)
        self._check_namespace(inode, target_dir)
        if flags == RENAME_EXCHANGE:
            _, inode2 = target or self._expect(parent2, name2)
            if inode2.is_dir and inode2.ino != inode.ino:
                self._check_descent(inode2.ino, parent)
            self._check_namespace(inode2, source_dir)
        elif target is not None and flags == RENAME_NOREPLACE:
            raise ExistsError(f"{name2!r} exists in directory {parent2}")
        elif target is not None and target[1].is_dir != inode.is_dir:
            raise (IsADirError if target[1].is_dir else NotADirError)(
                f"{name2!r} in directory {parent2} cannot be replaced by what is of another kind"
            )
        return source_dir, entry, inode, target_dir, target

    def arrivals(
        self, parent: int, name: bytes, parent2: int, name2: bytes, flags: int
    ) -> list[tuple[Namespace, int, int]]:
        """What a rename would bring into other namespaces: each with bytes and objects more.

        That is of files: what is below a directory is accounted to where it is in the background.
        Raises what `rename` does.
        """
        if parent == parent2:  # the usual rename
            return []
        directories = [self.residency.inode(ino) for ino in (parent, parent2)]
        if len({None if one is None else one.namespace for one in directories}) == 1:
            return []
        move = self._check_rename(parent, name, parent2, name2, flags)
        source_dir, _, inode, target_dir, target = move
        if inode.namespace == target_dir.namespace:  # a walk is yet to come to its old directory
            return []
        comes, goes = _counted(inode), (0, 0)
        if target is not None and (flags == RENAME_EXCHANGE or self._is_last(target[1])):
            goes = _counted(target[1])
        more = (comes[0] - goes[0], comes[1] - goes[1])
        found = [(self.namespaces.of(target_dir), *more)]
        if flags == RENAME_EXCHANGE:
            found.append((self.namespaces.of(source_dir), -more[0], -more[1]))
        return [one for one in found if one[1] > 0 or one[2] > 0]

    def _is_last(self, inode: Inode) -> bool:
        """Whether it goes with one name less."""
        return len(inode.links) == 1 and inode.ino not in self.residency.open

    def _exchange(
        self,
        source_dir: Inode,
        entry: Dentry,
        inode: Inode,
        target_dir: Inode,
        entry2: Dentry,
        inode2: Inode,
    ) -> None:
        with self.catalog.batch() as batch:
            batch.unlink(source_dir.ino, entry)  # both before either is made again
            batch.unlink(target_dir.ino, entry2)
            moved, moved2 = entry2._replace(ino=inode.ino), entry._replace(ino=inode2.ino)
            self._move(inode, entry, source_dir, target_dir, moved, batch)
            self._move(inode2, entry2, target_dir, source_dir, moved2, batch)
            self._changed(source_dir, batch)
            self._changed(target_dir, batch)
            batch.answers()

    def _move(
        self,
        inode: Inode,
        entry: Dentry,
        source_dir: Inode,
        target_dir: Inode,
        moved: Dentry,
        batch: Batch,
    ) -> None:
        """The inode gets another name; the caller has unlinked `entry`.

        A name that was there before keeps its cookie, so that a listing shows it once.
        """
        before = inode.copy()
        old, new = (source_dir.ino, entry.cookie), (target_dir.ino, moved.cookie)
        inode.links = tuple(new if link == old else link for link in inode.links)
        inode.ctime_ns = self.now()
        source_dir.subdirs -= inode.is_dir
        target_dir.subdirs += inode.is_dir
        batch.link(target_dir.ino, moved)
        if inode.is_dir:
            self._move_directory(inode, target_dir, batch)
        else:
            self.namespaces.places.place(inode, target_dir, moved.name, batch)
            if _place_of(inode) != _place_of(before) and self.residency.accounted(inode):
                batch.then(partial(self.residency.dismiss, before))
                batch.then(partial(self.residency.admit, inode))
        batch.put(inode)

    def _move_directory(self, inode: Inode, target_dir: Inode, batch: Batch) -> None:
        """All below it is accounted to where it is now, in the background."""
        batch.then(self.namespaces.places.forget_paths)
        if inode.namespace not in (inode.ino, target_dir.namespace):
            inode.namespace = target_dir.namespace
            self.namespaces.account_anew(inode.ino, batch)

    def _check_namespace(self, inode: Inode, target_dir: Inode) -> None:
        if self.namespaces.own(inode.ino) and target_dir.ino != ROOT_INO:
            raise OtherNamespaceError(f"directory {inode.ino} is a namespace: it stays at the top")
        if len(inode.links) > 1 and not inode.is_dir and inode.namespace != target_dir.namespace:
            raise OtherNamespaceError(
                f"inode {inode.ino} has other names: it cannot move to another namespace"
            )

    def _replace(self, directory: Inode, entry: Dentry, old: Inode, batch: Batch) -> None:
        if old.is_dir:
            self._rmdir(directory, entry, old, batch)
        else:
            self._unlink(directory.ino, entry, old, batch)

    def _check_descent(self, ino: int, into: int) -> None:
        """A directory must not move below itself."""
        while into != ROOT_INO:
            if into == ino:
                raise InvalidError(f"directory {ino} cannot move into itself")
            into = self._parent(self.directory(into)).ino

    # Attributes

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
        inode = self.inode(ino)
        if mode is not None:
            inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)
        elif inode.is_file and (uid is not None or gid is not None):
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
        inode.ctime_ns = self.now()
        with self.catalog.batch() as batch:
            batch.put(inode)
        return inode

    def used(self, inode: Inode) -> None:
        """Note an access, as relatime does: when older than the last change, or than a minute.

        Evictors of other people sort by atime, and a restart rebuilds the order of use from it.
        Where objects live for a time after their last use it is noted more often.
        """
        now = self.now()
        step = self.namespaces.of(inode).use_step(ATIME_STEP)
        if inode.atime_ns <= inode.mtime_ns or now - inode.atime_ns > step:
            inode.atime_ns = now
            with self.catalog.batch() as batch:
                batch.put(inode)

    # Extended attributes

    def xattr(self, ino: int, name: bytes) -> bytes:
        value = self.catalog.xattr(ino, name)
        if value is None:
            raise NoAttributeError(f"inode {ino} has no attribute {name!r}")
        return value

    def xattrs(self, ino: int) -> list[bytes]:
        return self.catalog.xattr_names(ino)

    def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        inode = self.inode(ino)
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
        names = {*self.xattrs(ino), name}
        if sum(map(len, names)) + len(names) > XATTR_NAMES_MAX:
            raise AttributeTooLargeError(f"inode {ino} has {len(names) - 1} attributes already")
        inode.ctime_ns = self.now()
        with self.catalog.batch() as batch:
            batch.set_xattr(ino, name, value)
            batch.put(inode)

    def remove_xattr(self, ino: int, name: bytes) -> None:
        self.xattr(ino, name)
        inode = self.inode(ino)
        inode.ctime_ns = self.now()
        with self.catalog.batch() as batch:
            batch.remove_xattr(ino, name)
            batch.put(inode)
            batch.answers()


ATIME_STEP = 60 * 10**9  # ns


def _counted(inode: Inode) -> tuple[int, int]:
    """Bytes and objects that a quota counts."""
    return (Tier.cost(inode.blocks), 1) if inode.is_file else (0, 0)


def _place_of(inode: Inode) -> tuple[int, int, int, int, bool]:
    """What accounts and orders go by."""
    return inode.namespace, inode.key, inode.parent_key, inode.model, inode.kept


def _check_name(name: bytes) -> None:
    if len(name) > NAME_MAX:
        raise NameTooLongError(f"name of {len(name)} bytes, at most {NAME_MAX}")

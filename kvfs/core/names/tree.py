"""Look up, list, make and remove names: directories, links and special files.

Contract: every method is synchronous and is one catalog batch. So what a method has checked is
still true when the batch commits. The kernel checks permissions (default_permissions). A new or
moved inode is accounted to the namespace of its directory.

A *hidden* entry is in the catalog, but programs do not find it: its bytes went away with the RAM
tier, it is expired, or its namespace was dropped.

Not for content, nor for the settings of namespaces. `Renames` gives inodes other names.
`Attributes` changes modes, owners, times and extended attributes.
"""

import stat
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvfs.catalog import LINK_MAX, ROOT_INO, Batch, Catalog, Dentry, Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.errors import (
    ExistsError,
    InvalidError,
    IsADirError,
    NameTooLongError,
    NotADirError,
    NotEmptyError,
    NotFoundError,
    NotPermittedError,
    OtherNamespaceError,
    StaleError,
    TooManyLinksError,
)
from kvfs.settings import Settings

NAME_MAX = 255
TARGET_MAX = 4095
RESERVED = b".kvfs"  # a name at the top of the mount: the directory of the control files
COOKIE_SELF, COOKIE_PARENT = 1, 2
HIDDEN_STEP = 8  # hidden entries that one step of a listing drops; each takes 30 to 100 us
HIDDEN_MAX = 1000  # hidden entries that one rmdir unlinks; they take some 30 ms


class Listing(NamedTuple):
    """Some entries of a directory, each with its name, inode and cookie.

    cookie: of the last entry that was looked at. The next listing starts behind this cookie.
    """

    entries: list[tuple[bytes, Inode, int]]
    cookie: int
    ended: bool  # there are no entries behind `cookie`


class Tree:
    """The names of a mount.

    templates: returns the settings that a new top-level directory gets by its name, or None.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        templates: Callable[[str], Settings | None] = lambda _: None,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        self.ledger = ledger
        self.namespaces = ledger.namespaces
        self.templates = templates
        self.catalog: Catalog = ledger.catalog
        self.now = now

    def make_root(self, *, uid: int, gid: int) -> None:
        if self.catalog.inode(ROOT_INO) is None:
            inode = self.new(stat.S_IFDIR | 0o755, uid, gid)
            inode.ino = ROOT_INO
            inode.links = ((ROOT_INO, COOKIE_SELF),)
            with self.catalog.batch() as batch:
                batch.put(inode)

    def new(self, mode: int, uid: int, gid: int) -> Inode:
        """Return a new inode record without number and names. The catalog does not have it yet."""
        now = self.now()
        return Inode(
            ino=0, mode=mode, uid=uid, gid=gid, atime_ns=now, mtime_ns=now, ctime_ns=now, links=()
        )

    # Looking

    def inode(self, ino: int) -> Inode:
        found = self.ledger.table.inode(ino)
        if found is None:
            raise StaleError(f"{self.catalog.named(ino)} is gone")
        return found

    def directory(self, ino: int) -> Inode:
        found = self.inode(ino)
        if not found.is_dir:
            raise NotADirError(f"{self.catalog.named(ino)} is not a directory")
        return found

    def lookup(self, parent: int, name: bytes) -> Inode:
        """Return the inode of a name. Raises NotFoundError, also for a hidden entry."""
        _check_name(name)
        if name == b".":  # the kernel resolves an NFS handle so: `parent` may be a file
            found = self.inode(parent)
            if not found.links:
                raise StaleError(f"{self.catalog.named(parent)} has no name any more")
            return found
        if name == b"..":
            return self.parent(self.directory(parent))
        entry = self.catalog.lookup(parent, name)
        if entry is None:  # also if the directory is gone and a process is still in it
            raise NotFoundError(f"no {name!r} there")
        return self._living(entry)

    def parent(self, directory: Inode) -> Inode:
        if not directory.links:
            raise NotFoundError(f"{self.catalog.named(directory.ino)} was removed")
        return self.directory(directory.links[0][0])

    def _living(self, entry: Dentry) -> Inode:
        inode = self.inode(entry.ino)
        if why := self._drop_if_hidden(inode, entry.name):
            raise NotFoundError(why)
        return inode

    def _drop_if_hidden(self, inode: Inode, name: bytes) -> str:
        """Return why an entry is hidden, or "" if it is not. Drop its inode if kvfs may."""
        if self.ledger.records.is_lost(inode):
            self.ledger.removals.drop(inode, "lost")
            return f"the bytes of {name!r} went away with the RAM tier"
        if self.ledger.removals.expire(inode):
            return f"{name!r} is expired, or its namespace was dropped"
        return ""

    def entry(self, parent: int, name: bytes) -> tuple[Dentry, Inode] | None:
        """Return the entry of a name and its inode. None if the name is free, or is hidden."""
        _check_name(name)
        entry = self.catalog.lookup(parent, name)
        if entry is None:
            return None
        try:
            return entry, self._living(entry)
        except NotFoundError:
            return None

    def expect(self, parent: int, name: bytes) -> tuple[Dentry, Inode]:
        found = self.entry(parent, name)
        if found is None:
            raise NotFoundError(f"no {name!r} there")
        return found

    def list_entries(
        self, ino: int, cookie: int, limit: int, *, hidden: int = HIDDEN_STEP
    ) -> Listing:
        """List up to `limit` entries behind a cookie.

        The result has fewer entries at the end of the directory, or after `hidden` hidden entries.
        hidden: the most hidden entries to skip. kvfs drops hidden objects unless they are open, and
        this takes time; the bound lets the loop do other tasks in between.
        An entry that exists during the whole listing is listed once, even if other entries come and
        go.
        """
        found: list[tuple[bytes, Inode, int]] = []
        directory = self.ledger.table.inode(ino)
        if directory is None or not directory.links or self.namespaces.is_dropped(directory):
            return Listing(found, cookie, ended=True)  # removed while open
        if cookie < COOKIE_SELF:
            found.append((b".", directory, COOKIE_SELF))
        if cookie < COOKIE_PARENT:
            found.append((b"..", self.parent(directory), COOKIE_PARENT))
            cookie = COOKIE_PARENT
        while len(found) < limit:
            wanted = limit - len(found)
            entries = self.catalog.entries_after(ino, cookie, wanted)
            inodes = self.catalog.inodes([entry.ino for entry in entries])
            for entry, stored in zip(entries, inodes, strict=True):
                cookie = entry.cookie
                held = self.ledger.table.peek(entry.ino)
                inode = stored if held is None else held.inode
                if inode is not None and not self._drop_if_hidden(inode, entry.name):
                    found.append((entry.name, inode, cookie))
                    continue
                hidden -= 1
                if not hidden:
                    return Listing(found, cookie, ended=False)
            if len(entries) < wanted:
                return Listing(found, cookie, ended=True)
        return Listing(found, cookie, ended=False)

    # Making

    def check_new(self, parent: int, name: bytes) -> Inode:
        """Return the directory of a new name. Raises ExistsError if the name is taken."""
        directory = self.directory_for_new_entry(parent)
        if name in {b".", b".."} or self.entry(parent, name) is not None:
            raise ExistsError(f"{name!r} exists")
        return directory

    def directory_for_new_entry(self, ino: int) -> Inode:
        """Return a directory that may get a new entry. Raises an error if it was removed."""
        directory = self.ledger.table.inode(ino)
        if directory is None:
            raise NotFoundError(f"{self.catalog.named(ino)} is gone")
        if not directory.is_dir:
            raise NotADirError(f"{self.catalog.named(ino)} is not a directory")
        if directory.key and not directory.links:
            # A new directory of the same block may have the name by now. ESTALE makes the kernel
            # look the name up again. A lookup in the removed directory gives ENOENT instead:
            # programs that remove a tree by descriptors expect that.
            raise StaleError(f"{self.catalog.named(ino)} was removed")
        if not directory.links or self.namespaces.is_dropped(directory):
            raise NotFoundError(f"{self.catalog.named(ino)} was removed")
        return directory

    def new_in(self, directory: Inode, mode: int, uid: int, gid: int) -> Inode:
        """Return a new inode record that belongs in a directory; like `new`, it is not stored.

        The inode of a setgid directory gets the directory's group. For a file, settings of the
        namespace may replace the owner, the group and the mode.
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

    def maker(
        self, parent: int, name: bytes, mode: int, uid: int, gid: int
    ) -> tuple[Inode, Callable[[], tuple[Inode, Inode]]]:
        """Return the directory of a new file, and a function for the commit of the file.

        This method checks the name. The function checks it again if the catalog has changed since.
        It returns the directory as it is then, and the new inode.
        """
        state = self.catalog.database.state
        directory = self.check_new(parent, name)

        def make() -> tuple[Inode, Inode]:
            same = self.catalog.database.state == state
            current = directory if same else self.check_new(parent, name)
            return current, self.new_in(current, mode, uid, gid)

        return directory, make

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
        """Make a directory, symbolic link, fifo, socket or device node.

        settings: settings for a new top-level directory. None: `templates` gives them.
        """
        if len(target) > TARGET_MAX:
            raise NameTooLongError(f"link target of {len(target)} bytes, at most {TARGET_MAX}")
        directory = self.check_new(parent, name)
        inode = self.new_in(directory, mode, uid, gid)
        inode.ino = self.catalog.next_id()
        inode.links = ((parent, inode.ino),)
        inode.rdev, inode.target, inode.size = rdev, target, len(target)
        directory.subdirs += inode.is_dir
        with self.catalog.batch() as batch:
            if parent == ROOT_INO and inode.is_dir:
                self.namespaces.pool_made(name, batch)
                settings = settings or self.templates(name.decode("utf-8", "surrogateescape"))
                if settings is not None:
                    inode.namespace = inode.ino
                    self.namespaces.set(inode.ino, settings, batch)
            batch.put(inode)
            batch.link(parent, Dentry(name, inode.ino, inode.ino))
            self.touch(directory, batch)
            batch.answers(inode.ino)
        if inode.is_dir:
            self.ledger.absent_names.made(inode.ino)
        return inode

    def link(self, ino: int, parent: int, name: bytes) -> Inode:
        """Give an inode one more name (a hard link) in the same namespace."""
        inode = self.inode(ino)
        if inode.is_dir:
            raise NotPermittedError(
                f"{self.catalog.named(ino)} is a directory: it can have one name only"
            )
        if not inode.links:
            raise NotFoundError(f"{self.catalog.named(ino)} has no name left to link to")
        if len(inode.links) >= LINK_MAX:
            raise TooManyLinksError(
                f"{self.catalog.named(ino)} has {LINK_MAX} names, which is the most"
            )
        directory = self.check_new(parent, name)
        if inode.namespace != directory.namespace:
            raise OtherNamespaceError(
                f"{self.catalog.named(ino)} cannot have a name in another namespace"
            )
        entry = Dentry(name, ino, self.catalog.next_id())
        inode.links = (*inode.links, (parent, entry.cookie))
        inode.ctime_ns = self.now()
        with self.catalog.batch() as batch:
            batch.put(inode)
            batch.link(parent, entry)
            self.touch(directory, batch)
            batch.answers(ino)
        return inode

    def touch(self, directory: Inode, batch: Batch) -> None:
        """Set the modification time of a directory whose entries change, and put its record."""
        directory.mtime_ns = directory.ctime_ns = self.now()
        batch.put(directory)

    # Removing

    def unlink(self, parent: int, name: bytes) -> None:
        directory = self.directory(parent)
        entry, inode = self.expect(parent, name)
        if inode.is_dir:
            raise IsADirError(f"{name!r} is a directory")
        with self.catalog.batch() as batch:
            self.remove_name(parent, entry, inode, batch)
            self.touch(directory, batch)
            batch.answers()

    def remove_name(self, parent: int, entry: Dentry, inode: Inode, batch: Batch) -> None:
        """Remove one name of an inode that is no directory.

        An inode without a name stays while the kernel may still use it; otherwise it goes at once.
        """
        batch.unlink(parent, entry)
        first = batch.change(inode).links[0]
        inode.links = tuple(link for link in inode.links if link != (parent, entry.cookie))
        inode.ctime_ns = self.now()
        if inode.links:
            if inode.links[0] != first:
                self.ledger.dirty.on_new_name(inode, batch)
                self._place_anew(inode, batch)
            batch.put(inode)
            return
        batch.then(partial(self.namespaces.of(inode).went, inode))
        if inode.ino in self.ledger.table.open:
            self.ledger.orphans.unlinked_open(inode, batch)
        elif not inode.is_file or self.ledger.tiers.can_open(inode):
            self.ledger.orphans.keep(inode, batch)
        else:
            self.ledger.removals.forget(inode, batch)

    def _place_anew(self, inode: Inode, batch: Batch) -> None:
        """Account an inode by its first name, which has changed: see `Places.place`."""
        if (found := self.catalog.first_name(inode)) is None:
            return
        directory, entry = found
        before = inode.copy()
        self.namespaces.places.place(inode, directory, entry.name, batch)
        if inode != before:
            self.account_anew(before, inode, directory, entry.name, batch)

    def account_anew(
        self,
        before: Inode,
        inode: Inode,
        directory: Inode,
        name: bytes,
        batch: Batch,
        *,
        old: bool = False,
    ) -> None:
        """Move an inode in the accounts from its place `before` to its new place.

        directory, name: the name that gave it the new place. old: eviction keeps the age of the
        inode. False: the inode becomes the youngest.
        """
        log = self.namespaces.access_log
        if log.on and inode.is_file:
            log.renamed(before, inode, directory, name, batch)
        accounts = self.ledger.accounts
        if accounts.accounted(inode):
            batch.then(partial(accounts.dismiss, before))
            batch.then(partial(accounts.count_anew if old else accounts.enter, inode))
            batch.then(partial(self.namespaces.of(before).went, before))
            batch.then(partial(self.namespaces.of(inode).came, inode))

    def rmdir(self, parent: int, name: bytes) -> None:
        directory = self.directory(parent)
        if name == b".":
            raise InvalidError("'.' cannot be removed")
        if name == b"..":
            raise NotEmptyError("'..' cannot be removed")
        entry, inode = self.expect(parent, name)
        with self.catalog.batch() as batch:
            self.remove_directory(directory, entry, inode, batch)
            self.touch(directory, batch)
            batch.answers()

    def remove_directory(self, directory: Inode, entry: Dentry, inode: Inode, batch: Batch) -> None:
        """Remove an empty directory `inode`, which has the name `entry` in `directory`."""
        if not inode.is_dir:
            raise NotADirError(f"{entry.name!r} is not a directory")
        listed = self.list_entries(inode.ino, COOKIE_PARENT, 1, hidden=HIDDEN_MAX + 1)
        if listed.entries:
            raise NotEmptyError(f"directory {entry.name!r} has entries")
        if not listed.ended:
            raise NotEmptyError(f"directory {entry.name!r} has entries that are yet to go")
        self._unlink_hidden(inode, batch)
        batch.unlink(directory.ino, entry)
        inode.links = ()
        inode.ctime_ns = self.now()
        self.ledger.orphans.keep(inode, batch)
        directory.subdirs -= 1
        if self.namespaces.own(inode.ino):
            self.namespaces.forget(inode.ino, batch)

    def _unlink_hidden(self, directory: Inode, batch: Batch) -> None:
        """Unlink the hidden entries of a directory that is being removed.

        Such an entry expired while it was open, or moved in from a namespace that was dropped.
        """
        entries = self.catalog.entries_after(directory.ino, 0, HIDDEN_MAX + 1)
        inodes = {entry.ino: self.ledger.table.inode(entry.ino) for entry in entries}
        for entry in entries:
            inode = inodes[entry.ino]
            if inode is None:
                batch.unlink(directory.ino, entry)
            elif inode.is_dir or len(entries) > HIDDEN_MAX:
                raise NotEmptyError(
                    f"{self.catalog.named(directory.ino)} has entries that are yet to go"
                )
            else:
                self.remove_name(directory.ino, entry, inode, batch)


def is_name(name: bytes, parent: int = 0) -> bool:
    """Whether kvfs allows this name in this directory. The name comes from another program."""
    reserved = parent == ROOT_INO and name == RESERVED
    wrong = reserved or name in {b".", b".."} or b"/" in name or b"\0" in name
    return 0 < len(name) <= NAME_MAX and not wrong


def _check_name(name: bytes) -> None:
    if len(name) > NAME_MAX:
        raise NameTooLongError(f"name of {len(name)} bytes, at most {NAME_MAX}")

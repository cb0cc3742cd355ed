"""Remote entries of the pool: objects that other nodes have get or lose names here.

Contract: synchronous; each method checks the present state, and changes it in one batch. An answer
of the index never replaces a name that is known here. Not for questions (`pool/lookup`).
"""

import logging
import stat
from collections.abc import Iterable
from functools import partial

from kvfs.catalog import ROOT_INO, Dentry, Inode
from kvfs.core.bucket.listing.bucket_lookup import LastSeen
from kvfs.core.names.tree import Tree, is_name
from kvfs.core.pool.leaving import Leaving
from kvfs.core.pool.tokens import DropTokens
from kvfs.pool.records import PoolEntry, Switch
from kvfs.s3.chunks import Chunks
from kvfs.s3.facts import Facts
from kvfs.s3.keys import KEY_MAX, Keys, ObjectName, escape, unescape
from kvfs.settings import Settings

log = logging.getLogger(__name__)

# s after a drop for which the other nodes may have objects of the namespace still: it would come
# back as a directory with their names.
DROPPED_S = 10.0
DIRECTORY_MODE = 0o755  # of directories that only the index lists


class PoolEntries:
    """The remote entries of one mount."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.ledger = tree.ledger
        self.catalog = tree.catalog
        self.namespaces = tree.namespaces
        self.keys = Keys("")
        self.leaving = Leaving(self.catalog)
        self.tokens = DropTokens(self.catalog)
        self.dropped: LastSeen[str] = LastSeen()  # namespaces, by name

    # Keys

    def is_shared(self, inode: Inode) -> bool:
        """Whether the namespace of a file or directory takes part in the pool."""
        return self.namespaces.of(inode).settings.pool

    def key(self, inode: Inode) -> str | None:
        """The key of an object by its first name, shared or not; None if it can have none."""
        return self.keys_of([inode]).get(inode.ino)

    def keys_of(self, inodes: Iterable[Inode]) -> dict[int, str | None]:
        """The keys of many objects, as `key` returns them."""
        named = [inode for inode in inodes if inode.links]
        entries = self.catalog.dentries([inode.links[0] for inode in named])
        folders, found = dict[int, tuple[Inode, str]](), dict[int, str | None]()
        for inode, entry in zip(named, entries, strict=True):
            found[inode.ino] = self._key(inode.links[0][0], entry, folders) if entry else None
        return found

    def _key(self, parent: int, entry: Dentry, folders: dict[int, tuple[Inode, str]]) -> str | None:
        """The key of an entry. folders: directories and their folders, as this call knows them."""
        directory, folder = folders.get(parent) or (self.catalog.inode(parent), "")
        if directory is None or self.namespaces.places.is_temporary(directory, entry.name):
            return None
        if folder and len(key := folder + escape(entry.name)) <= KEY_MAX:
            return key
        name = self.namespaces.bucket_name(directory, entry.name, dropped=True)
        if name is None:
            return None
        key = self.keys.of(_in_pool(name))
        if (listed := self.folder_of(key)) is not None:
            folders[parent] = directory, listed[0]
        return key

    def key_of_name(self, parent: int, name: bytes) -> tuple[str, str] | None:
        """The key of a name that is not known here, and its folder if it may be a directory."""
        directory = self._directory(parent)
        if directory is None or not is_name(name, parent) or not self.is_shared(directory):
            return None
        called = self.namespaces.bucket_name(directory, name)
        if called is None or self.namespaces.places.is_temporary(directory, name):
            return None
        called = _in_pool(called)
        folder = self.keys.folder(*called) if called.namespace else self.top_folder(name)
        if len(folder) > KEY_MAX or self.namespaces.places.block_of(directory, name):
            folder = ""
        return self.keys.of(called), folder

    def top_folder(self, name: bytes, version: int = 1) -> str:
        """The folder of a top-level directory, which is a namespace in the pool."""
        return self.keys.folder(name, version)

    def folder(self, ino: int) -> str | None:
        """The folder that lists the names in a directory; None if the pool has none for it."""
        directory = self._directory(ino)
        if directory is not None and not self.is_shared(directory):
            return None
        called = None if directory is None else self.namespaces.bucket_name(directory, b"x")
        if called is None:
            return None
        called = _in_pool(called)
        found = self.keys.folder(*called[:2], called.path.rpartition(b"/")[0])
        return found if len(found) <= KEY_MAX else None

    def _folder_below(self, parent: int, name: bytes, switch: Switch | None) -> str | None:
        """The folder of a directory that is not known here; None if the pool has none for it."""
        if parent == ROOT_INO:
            return self.top_folder(name, 1 if switch is None else max(1, switch.version))
        folder = self.folder(parent)
        return None if folder is None else f"{folder}{escape(name)}/"

    def name_of(self, parent: int, text: str) -> bytes | None:
        """The name that a listing shows, without the slash of a directory.

        None for a name that no program could make in the directory `parent`.
        """
        name = unescape(text.removesuffix("/"))
        return name if name is not None and is_name(name, parent) else None

    def folder_of(self, key: str) -> tuple[str, str] | None:
        """The folder that lists a key, and its name there; None for the key of a long name."""
        folder, slash, name = key.rpartition("/")
        return None if key.startswith(self.keys.long) or not slash else (f"{folder}/", name)

    def above(self, folder: str) -> tuple[str, str] | None:
        """The folder that lists a folder, and its name there; None for the top."""
        above, slash, name = folder.rstrip("/").rpartition("/")
        if slash:
            return f"{above}/", f"{name}/"
        top = name.rpartition("@")[0].replace("%40", "@")
        return (self.keys.folder(b"", 0), f"{top}/") if top else None

    def key_in(self, bucket: Keys, key: str) -> str:
        """The key of an object in a bucket, from its key here; "" if it has none.

        There, a top-level directory without settings belongs to the mount's own namespace.
        """
        if key.startswith(self.keys.long):
            return bucket.prefix + key
        name = self.keys.parse(key)
        if name is None:
            return ""
        top, version, path = name
        entry = self.catalog.lookup(ROOT_INO, top) if top else None
        if top and version == 1 and (entry is None or self.namespaces.own(entry.ino) is None):
            return bucket.of(ObjectName(b"", 0, top + b"/" + path))
        return bucket.of(name)

    # Names

    def enter(self, parent: int, name: bytes, key: str, entry: PoolEntry) -> bool:
        """Enter a name for a remote object. False: the state here has changed meanwhile."""
        directory = self._directory(parent)
        asked = self.key_of_name(parent, name)
        if directory is None or asked is None or asked[0] != key:
            return False
        if self.catalog.lookup(parent, name) is not None:
            return True
        if self.leaving.hides(key, entry.facts, entry):
            return False
        self.leaving.announced(key, entry.facts)
        facts = entry.facts
        inode = self.tree.new(stat.S_IFREG, 0, 0)
        inode.ino = self.catalog.next_id()
        inode.links = ((parent, inode.ino),)
        inode.version = 1
        inode.session = self.ledger.session
        inode.sealed = inode.in_pool = True
        _describe(inode, facts)
        if self.namespaces.of(directory).expired(inode):
            return False
        top = self.namespaces.top_name(parent)
        if parent != ROOT_INO and self.tokens.hides(top, facts.mtime_ns):
            return False
        with self.catalog.batch() as batch:
            self.namespaces.places.place(inode, directory, name, batch)
            if inode.model and not inode.parent_key and facts.key == inode.key:
                inode.parent_key = facts.parent_key
            batch.put(inode)
            batch.link(parent, Dentry(name, inode.ino, inode.ino))
            batch.then(partial(self.ledger.accounts.enter, inode))
        return True

    def follow(self, ino: int, entry: PoolEntry) -> None:
        """Give a remote object the mode and owner that the index has. Raises CatalogError.

        No other task may have the inode's lock.
        """
        inode, facts = self.ledger.table.inode(ino), entry.facts
        if inode is None or not inode.in_pool or inode.digest != facts.digest:
            return
        wanted = (_mode(facts), facts.uid, facts.gid)
        if (inode.mode, inode.uid, inode.gid) != wanted:
            with self.catalog.batch() as batch:
                batch.change(inode)
                inode.mode, inode.uid, inode.gid = wanted
                batch.put(inode)

    def make_directory(self, parent: int, name: bytes, switch: Switch | None = None) -> bool:
        """Make a directory that the index lists. False if names or templates forbid it.

        switch: what the index said of a top-level directory, before it said what is listed there.
        A greater version than 1 makes the directory a namespace.
        """
        directory = self._directory(parent)
        if directory is None or not is_name(name, parent):
            return False
        if self.catalog.lookup(parent, name) is not None:
            return True
        folder = self._folder_below(parent, name, switch)
        if folder is not None and self.leaving.any_below(folder):
            return False  # a program here has just removed it
        settings, text = None, name.decode("utf-8", "surrogateescape")
        if directory.ino == ROOT_INO:
            settings = self.tree.templates(text)
            if settings is not None and not settings.pool:
                return False
            if self.dropped.age(text) < DROPPED_S or self.namespaces.last_dropped(text):
                return False
            if switch is not None and switch.version > 1:
                settings = (settings or Settings()).changed({"version": str(switch.version)})
        mode = stat.S_IFDIR | DIRECTORY_MODE
        with self.tokens.of_next(text, None if switch is None else switch.dropped):
            self.tree.make(parent, name, mode, directory.uid, directory.gid, settings=settings)
        return True

    def forget(self, ino: int) -> None:
        """Forget a remote object: the kernel has forgotten it, or no node gives it.

        No other task may have the inode's lock.
        """
        inode = self.ledger.table.inode(ino)
        if inode is None or not inode.in_pool or self.ledger.tiers.holders(inode):
            return
        if ino in self.ledger.table.open:
            return
        self.ledger.removals.forget_remote(inode)

    def _directory(self, ino: int) -> Inode | None:
        found = self.ledger.table.inode(ino)
        if found is None or not found.is_dir or not found.links:
            return None
        return None if self.namespaces.is_dropped(found) else found


def _in_pool(name: ObjectName) -> ObjectName:
    """The name of an object in the pool, from its name in a bucket.

    A top-level directory is a namespace of version 1 there, with and without settings: nodes may
    have different ones.
    """
    top, slash, path = name.path.partition(b"/")
    return ObjectName(top, 1, path) if slash and not name.namespace else name


def facts_of(inode: Inode, model: str, chunks: Chunks | None = None) -> Facts:
    """The facts of an object that has its digest."""
    return Facts(
        size=inode.size,
        digest=inode.digest,
        mtime_ns=inode.backing_mtime_ns,
        mode=stat.S_IMODE(inode.mode),
        uid=inode.uid,
        gid=inode.gid,
        key=inode.key,
        parent_key=inode.parent_key,
        model=model,
        stored_size=inode.size,
        stored_digest=inode.digest,
        chunks=chunks,
    )


def _mode(facts: Facts) -> int:
    """The mode of a file in the index, without set-user-id: a client of it could give that."""
    return stat.S_IFREG | (facts.mode & 0o777)


def _describe(inode: Inode, facts: Facts) -> None:
    inode.mode = _mode(facts)
    inode.uid, inode.gid = facts.uid, facts.gid
    inode.size, inode.blocks = facts.size, -(-facts.size // 4096) * 8
    inode.mtime_ns = inode.backing_mtime_ns = facts.mtime_ns
    inode.digest = facts.digest

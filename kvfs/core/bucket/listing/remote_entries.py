"""Remote entries: objects that other nodes put into the bucket get or lose names here.

Contract: synchronous; each method checks the present state, and changes it in one batch. An answer
of the bucket never replaces a name that is known here. A file that this mount has unlinked, renamed
or replaced does not come back before the bucket has followed. Older answers about its key are
ignored (`gone`, see `Superseded.watching`). Nothing is ever deleted in the bucket here. An inode
that only a listing told of is a *stub*: its size and times are the store's, and its digest is not
known. So programs cannot read it before `renew` has brought its metadata. An object in conflict
with another node becomes dirty when no other object has its name there. Not for questions to the
bucket (`bucket_lookup`), nor for directories (`remote_directories`).
"""

import logging
import math
import stat
from collections.abc import Callable, Collection, Iterable
from functools import partial

import trio

from kvfs.catalog import ROOT_INO, Batch, Dentry, Inode, Stored, keys
from kvfs.core.bucket.listing.remote_directories import EntryName, NameState, RemoteDirectories
from kvfs.core.names.tree import Tree, is_name
from kvfs.movement.looking import LookupAnswer, LookupQuestion, Seen
from kvfs.s3.facts import Facts
from kvfs.s3.keys import KEY_MAX
from kvfs.s3.store import Entry
from kvfs.tiers import Bucket

log = logging.getLogger(__name__)

SECOND = 10**9
FILE_MODE = 0o644  # of listed files
SHARE = 4  # conflicts end only while less than one part of this many of `most` is dirty
LOGGED_FOR = 60.0  # s in which only one end of a conflict is logged


def is_stub(inode: Inode) -> bool:
    """Whether all that is known of the inode is that it is in the bucket."""
    return inode.in_bucket and not inode.digest


class RemoteEntries:
    """The remote entries of one bucket."""

    def __init__(self, tree: Tree, bucket: Bucket) -> None:
        self.tree = tree
        self.bucket = bucket
        self.ledger = tree.ledger
        self.namespaces = tree.namespaces
        self.catalog = tree.catalog
        self.dirty = tree.ledger.dirty
        self.superseded = self.dirty.superseded
        self.keys = bucket.keys
        self._logged_at = -math.inf
        # Whether the name of an object in a directory has gone: a node of a pool has unlinked it.
        self.has_left: Callable[[int, bytes, Facts], bool] = lambda *_: False
        self.remote_directories = RemoteDirectories(tree, bucket)

    # Questions

    def ask(self, place: EntryName) -> LookupQuestion | None:
        """The question about a name; None if it has no key, or is about to leave its key."""
        directory, name = self.remote_directories.directory(place.parent), place.name
        if directory is None or not is_name(name, place.parent):
            return None
        called = self.namespaces.bucket_name(directory, name)
        if called is None or self.namespaces.places.is_temporary(directory, name):
            return None
        key = self.keys.of(called)
        if key in self.superseded:
            return None
        folder = self.keys.folder(*called)
        if len(folder) > KEY_MAX or self.namespaces.places.block_of(directory, name):
            folder = ""
        top = directory.ino == ROOT_INO
        return LookupQuestion(key, folder, versions=self.keys.versions(name) if top else "")

    # Answers

    def enter_answer(
        self, place: EntryName, ask: LookupQuestion, answer: LookupAnswer, gone: Collection[str]
    ) -> NameState:
        """Enter the answer of the bucket about an unknown name. Raises CatalogError."""
        directory = self.remote_directories.directory(place.parent)
        if directory is None or self.catalog.lookup(*place) is not None:
            return "here" if directory is not None else "unsure"
        called = self.namespaces.bucket_name(directory, place.name)
        moved = called is None or self.keys.of(called) != ask.key
        if moved or ask.key in gone or ask.key in self.superseded or not self._keys_known():
            return "unsure"
        if answer.seen is not None:
            if self.bucket.gives_wrong_bytes(ask.key, answer.seen.etag):
                return "absent"
            if self.has_left(*place, answer.seen.facts):
                return "absent"
            return "here" if self.enter(place, ask.key, answer.seen) else "absent"
        if answer.strange:
            self.refuse(answer.strange)
        if answer.versions:
            return self.remote_directories.enter_namespace(place.name, answer.versions)
        if not answer.below:
            return "absent"
        if all(key in gone or key in self.superseded for key in answer.below):
            return "hidden"
        return "absent" if self.remote_directories.make_directory(place) is None else "here"

    def renew(
        self, ino: int, ask: LookupQuestion, answer: LookupAnswer, gone: Collection[str]
    ) -> NameState:
        """Compare a known object with the answer of the bucket. Raises CatalogError.

        If the object was deleted or replaced there, its name goes, unless a program has it open; a
        replacement takes its place. An object in conflict goes up if its name is free.
        """
        if ino in self.dirty.contested:
            return self._reconsider(ino, ask, answer, gone)
        inode, stored = self.ledger.table.inode(ino), self.dirty.stored(ino)
        if inode is None or not inode.in_bucket or not inode.sealed or stored is None:
            return "unsure"
        bare, seen = is_stub(inode), answer.seen
        if stored.key != ask.key or ask.key in gone:
            return "unsure"
        if seen is not None and (bare or seen.etag == stored.etag):
            if bare:
                self._complete(inode, ask.key, seen)
            return "here"
        if ino in self.ledger.table.open or ino in self.ledger.table.busy or not inode.links:
            return "unsure"
        if ino in self.dirty and not bare:
            return "unsure"  # its upload finds out
        parent, cookie = inode.links[0]
        entry = self.catalog.dentry(parent, cookie)
        named = self.catalog.named(ino)
        log.info("%s goes, %s has no such object any more: %s", named, self.bucket.place, ask.key)
        if answer.strange:
            self.refuse(answer.strange)
        self.ledger.removals.let_go(inode)
        if seen is None or entry is None:
            return "absent"
        return self.enter_answer(EntryName(parent, entry.name), ask, answer, gone)

    def _reconsider(
        self, ino: int, ask: LookupQuestion, answer: LookupAnswer, gone: Collection[str]
    ) -> NameState:
        """Check a conflict: "here" if another object still has the name.

        The object becomes dirty only if no other one has it.
        """
        inode, bucket = self.ledger.table.inode(ino), self.bucket
        if inode is None or self.dirty.key(inode) != ask.key or ask.key in gone:
            return "unsure"
        if not self._keys_known():
            return "unsure"
        seen = answer.seen
        ours = seen is None and not answer.strange
        if seen is not None and inode.digest:
            ours = (seen.facts.size, seen.facts.digest) == (inode.size, inode.digest)
        if not ours or self.dirty.bytes >= bucket.max_dirty_bytes // SHARE:
            return "here"
        with self.catalog.batch() as batch:
            self.dirty.mark(inode, batch)
        bucket.counters["conflicts_ended"] += 1
        logged = trio.current_time() < self._logged_at + LOGGED_FOR
        log.log(
            logging.DEBUG if logged else logging.INFO,
            "%s will be uploaded: no other object has its name in %s any more (said once a minute)",
            *(self.catalog.named(ino), bucket.place),
        )
        self._logged_at = self._logged_at if logged else trio.current_time()
        return "absent"

    def compare(self, ino: int, entry: Entry) -> NameState:
        """Compare a known object with its listing; "absent": the listing has another object."""
        inode, stored = self.ledger.table.inode(ino), self.dirty.stored(ino)
        if inode is None or not inode.in_bucket or not inode.sealed or ino in self.dirty:
            return "unsure"
        if stored is None or stored.key != entry.key:
            return "unsure"
        return "here" if stored.etag == entry.etag else "absent"

    def forget_unlisted(
        self, link: tuple[int, int], ino: int, prefix: str, gone: Collection[str]
    ) -> bool:
        """Let go an object that was not listed, if only the bucket had it.

        Returns whether to ask the bucket about it, because it has a copy here. An object whose name
        is too long for a key is never listed in its directory.
        """
        ledger, inode = self.ledger, self.ledger.table.inode(ino)
        if inode is None or inode.links[:1] != (link,):
            return False
        if ino in self.dirty.contested:  # its name is free, perhaps
            return True
        if not inode.in_bucket or not inode.sealed:
            return False
        if ino in ledger.table.open or ino in ledger.table.busy or ino in self.dirty:
            return False
        stored = self.dirty.stored(ino)
        if stored is None or not stored.key.startswith(prefix) or stored.key in gone:
            return False
        if ledger.tiers.holders(inode):
            return True
        ledger.removals.let_go(inode)
        return False

    def _keys_known(self) -> bool:
        """Whether it is known which keys are ours: no walk of a moved directory is pending."""
        return self.dirty.loaded and not self.namespaces.unaccounted

    def refuse(self, why: str) -> None:
        """Count and log an object of the bucket that kvfs cannot serve."""
        counters = self.bucket.counters
        counters["refused"] += 1
        level = logging.WARNING if counters["refused"] == 1 else logging.DEBUG
        log.log(level, "%s: an object is skipped (said once): %s", self.bucket.place, why)

    # Files

    def enter(self, place: EntryName, key: str, seen: Seen) -> bool:
        """Enter a name for an object. False if it has expired. The name must not be known."""
        with self.catalog.batch() as batch:
            taken = self._enter(place, seen.stored(key), seen.facts, batch)
        self.bucket.counters["found"] += taken
        return taken

    def enter_listed(self, parent: int, entries: Iterable[tuple[bytes, Entry]]) -> int:
        """Enter listed names that are not known yet. Returns how many are new."""
        directory = self.remote_directories.directory(parent)
        if directory is None or not self._keys_known():
            return 0
        places, new = self.namespaces.places, 0
        with self.catalog.batch() as batch:
            for name, entry in entries:
                if not is_name(name, parent) or self.catalog.lookup(parent, name) is not None:
                    continue
                if entry.key in self.superseded or places.is_temporary(directory, name):
                    continue
                if self.bucket.gives_wrong_bytes(entry.key, entry.etag):
                    continue
                stored = Stored(entry.key, entry.etag, entry.size, b"")
                new += self._enter(
                    EntryName(parent, name), stored, _listed(entry, directory), batch
                )
        self.bucket.counters["imported"] += new
        return new

    def take_below(self, entry: Entry) -> None:
        """Enter a listed name, with the directories above it."""
        name = self.keys.parse(entry.key)
        if name is None or entry.key in self.superseded:
            return
        directory = self.remote_directories.reach(name)
        if isinstance(directory, Inode):
            self.enter_listed(directory.ino, [(name.path.rpartition(b"/")[2], entry)])

    def _enter(self, place: EntryName, stored: Stored, facts: Facts, batch: Batch) -> bool:
        directory = self.remote_directories.directory(place.parent)
        if directory is None:
            return False
        inode = self.tree.new(stat.S_IFREG, 0, 0)
        inode.ino = self.catalog.next_id()
        inode.links = ((place.parent, inode.ino),)
        inode.version = 1
        inode.session = self.ledger.session
        inode.sealed = inode.in_bucket = True
        _describe(inode, facts)
        if self.namespaces.of(directory).expired(inode):
            return False
        self.namespaces.places.place(inode, directory, place.name, batch)
        # Take over the place in the prompt that its node has learned, if the keys are the same. The
        # key of a file that no layout knows contains a directory's number, which differs by node.
        if inode.model and not inode.parent_key and facts.key == inode.key:
            inode.parent_key = facts.parent_key
        if facts.digest:
            stored = stored._replace(attributes=inode.attributes)
        batch.put(inode)
        batch.link(place.parent, Dentry(place.name, inode.ino, inode.ino))
        batch.mark(keys.STORED, inode.ino, keys.stored_value(stored))
        batch.then(partial(self.ledger.accounts.enter, inode))
        return True

    def _complete(self, inode: Inode, key: str, seen: Seen) -> None:
        before = inode.copy()
        _describe(inode, seen.facts)
        stored = seen.stored(key)._replace(attributes=inode.attributes)
        with self.catalog.batch() as batch:
            batch.put(inode)
            batch.mark(keys.STORED, inode.ino, keys.stored_value(stored))
            batch.then(partial(self.ledger.records.account_known_size, before, inode))


def _describe(inode: Inode, facts: Facts) -> None:
    inode.mode = stat.S_IFREG | facts.mode
    inode.uid, inode.gid = facts.uid, facts.gid
    inode.size, inode.blocks = facts.size, -(-facts.size // 4096) * 8
    inode.mtime_ns = inode.backing_mtime_ns = facts.mtime_ns
    inode.digest = facts.digest


def _listed(entry: Entry, directory: Inode) -> Facts:
    return Facts(
        size=entry.size,
        digest=b"",
        mtime_ns=int(entry.modified * SECOND),
        mode=FILE_MODE,
        uid=directory.uid,
        gid=directory.gid,
        stored_size=entry.size,
        stored_digest=b"",
    )

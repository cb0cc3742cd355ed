"""What other nodes have put into the bucket: it gets a name here, its facts, or loses the name.

Contract: synchronous; each method looks at what is true now, and changes it in one batch. A name
that is known here is never replaced by what was told of the bucket, and what this mount has
unlinked, renamed or replaced does not rise again before the bucket has followed: what was asked
before is too old to be believed (`gone`, see `Superseded.watching`). Nothing is ever deleted there.
An inode that only a listing told of is *bare*: its size and times are the store's, its digest is
not known, so that nobody can read it before `renew` has brought its facts.
What is in conflict with another node becomes dirty when no other object has its name there.
Not for asking: `bucket_lookup`; nor for directories: `remote_directories`.
"""

import logging
import math
import stat
from collections.abc import Collection, Iterable
from functools import partial

import trio

from kvfs.catalog import ROOT_INO, Batch, Dentry, Inode, Stored, keys
from kvfs.core.bucket.listing.remote_directories import Place, RemoteDirectories, Verdict
from kvfs.core.names.tree import Tree, is_name
from kvfs.movement.looking import Answer, Ask, Seen
from kvfs.s3.facts import Facts
from kvfs.s3.keys import KEY_MAX
from kvfs.s3.store import Entry
from kvfs.tiers import Bucket

log = logging.getLogger(__name__)

SECOND = 10**9
FILE_MODE = 0o644  # of what a listing tells of
SHARE = 4  # of what may be dirty: conflicts end as long as less is, so that no writer waits for it
SAID_FOR = 60.0  # s in which only one end of a conflict is said


def is_stub(inode: Inode) -> bool:
    """Whether nothing is known of it but that it is in the bucket."""
    return inode.in_bucket and not inode.digest


class RemoteEntries:
    """Of one bucket."""

    def __init__(self, tree: Tree, bucket: Bucket) -> None:
        self.tree = tree
        self.bucket = bucket
        self.ledger = tree.ledger
        self.namespaces = tree.namespaces
        self.catalog = tree.catalog
        self.dirty = tree.ledger.dirty
        self.superseded = self.dirty.superseded
        self.keys = bucket.keys
        self._said_at = -math.inf
        self.remote_directories = RemoteDirectories(tree, bucket)

    # What to ask

    def ask(self, place: Place) -> Ask | None:
        """What to ask about a name; None if it is in no bucket, or about to leave it."""
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
        return Ask(key, folder, versions=self.keys.versions(name) if top else "")

    # What was told

    def settle(self, place: Place, ask: Ask, answer: Answer, gone: Collection[str]) -> Verdict:
        """Let a name that was not known be what the bucket says. Raises CatalogError."""
        directory = self.remote_directories.directory(place.parent)
        if directory is None or self.catalog.lookup(*place) is not None:
            return "here" if directory is not None else "unsure"
        called = self.namespaces.bucket_name(directory, place.name)
        moved = called is None or self.keys.of(called) != ask.key
        if moved or ask.key in gone or ask.key in self.superseded or not self._settled():
            return "unsure"
        if answer.seen is not None:
            if self.bucket.gives_wrong_bytes(ask.key, answer.seen.etag):
                return "absent"
            return "here" if self.take(place, ask.key, answer.seen) else "absent"
        if answer.strange:
            self.refuse(answer.strange)
        if answer.versions:
            return self.remote_directories.enter_namespace(place.name, answer.versions)
        if not answer.below:
            return "absent"
        if all(key in gone or key in self.superseded for key in answer.below):
            return "hidden"
        return "absent" if self.remote_directories.make_directory(place) is None else "here"

    def renew(self, ino: int, ask: Ask, answer: Answer, gone: Collection[str]) -> Verdict:
        """Hold what is known of an object against what the bucket says. Raises CatalogError.

        The name of one that was deleted or replaced there goes, unless somebody has it open; what
        replaced it takes its place. What is in conflict goes up if its name is free.
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
            return "unsure"  # whoever uploads it finds out
        parent, cookie = inode.links[0]
        entry = self.catalog.dentry(parent, cookie)
        log.info("inode %d is not in %s any more: %s", ino, self.bucket.place, ask.key)
        if answer.strange:
            self.refuse(answer.strange)
        self.ledger.removals.let_go(inode)
        if seen is None or entry is None:
            return "absent"
        return self.settle(Place(parent, entry.name), ask, answer, gone)

    def _reconsider(self, ino: int, ask: Ask, answer: Answer, gone: Collection[str]) -> Verdict:
        """Whether another object has its name still: "here". It goes up only where none has."""
        inode, bucket = self.ledger.table.inode(ino), self.bucket
        if inode is None or self.dirty.key(inode) != ask.key or ask.key in gone:
            return "unsure"
        if not self._settled():
            return "unsure"
        seen = answer.seen
        ours = seen is None and not answer.strange
        if seen is not None and inode.digest:
            ours = (seen.facts.size, seen.facts.digest) == (inode.size, inode.digest)
        if not ours or self.dirty.bytes >= bucket.most // SHARE:
            return "here"
        with self.catalog.batch() as batch:
            self.dirty.lacking(inode, batch)
        bucket.counters["conflicts_ended"] += 1
        said = trio.current_time() < self._said_at + SAID_FOR
        log.log(
            logging.DEBUG if said else logging.INFO,
            "inode %d is to go up: no other object has its name in %s any more "
            "(said once a minute)",
            *(ino, bucket.place),
        )
        self._said_at = self._said_at if said else trio.current_time()
        return "absent"

    def compare(self, ino: int, entry: Entry) -> Verdict:
        """Hold an object that is known against what was listed; "absent": that is another one."""
        inode, stored = self.ledger.table.inode(ino), self.dirty.stored(ino)
        if inode is None or not inode.in_bucket or not inode.sealed or ino in self.dirty:
            return "unsure"
        if stored is None or stored.key != entry.key:
            return "unsure"
        return "here" if stored.etag == entry.etag else "absent"

    def forget_unlisted(
        self, link: tuple[int, int], ino: int, prefix: str, gone: Collection[str]
    ) -> bool:
        """A directory was listed, and this was not there: it goes, if only the bucket had it.

        Whether the bucket is to be asked, since there is a copy here. What has a name too long for
        a key is never listed there.
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

    def _settled(self) -> bool:
        """Whether it is known what in the bucket is ours: a directory that moved is yet walked."""
        return self.dirty.loaded and not self.namespaces.unaccounted

    def refuse(self, why: str) -> None:
        """What is in the bucket is nothing that kvfs could serve."""
        counters = self.bucket.counters
        counters["refused"] += 1
        level = logging.WARNING if counters["refused"] == 1 else logging.DEBUG
        log.log(level, "%s: this is passed over (said once): %s", self.bucket.place, why)

    # Files

    def take(self, place: Place, key: str, seen: Seen) -> bool:
        """A name for an object. False if it has expired. The name must not be known."""
        with self.catalog.batch() as batch:
            taken = self._enter(place, seen.stored(key), seen.facts, batch)
        self.bucket.counters["found"] += taken
        return taken

    def take_listed(self, parent: int, entries: Iterable[tuple[bytes, Entry]]) -> int:
        """Names for what was listed, those that are not known yet; how many are new."""
        directory = self.remote_directories.directory(parent)
        if directory is None or not self._settled():
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
                new += self._enter(Place(parent, name), stored, _listed(entry, directory), batch)
        self.bucket.counters["imported"] += new
        return new

    def take_below(self, entry: Entry) -> None:
        """A name for what was listed, with the directories above it."""
        name = self.keys.parse(entry.key)
        if name is None or entry.key in self.superseded:
            return
        directory = self.remote_directories.reach(name)
        if isinstance(directory, Inode):
            self.take_listed(directory.ino, [(name.path.rpartition(b"/")[2], entry)])

    def _enter(self, place: Place, stored: Stored, facts: Facts, batch: Batch) -> bool:
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
        # What its node has learned of its prompt, if they mean the same: the key of a file that no
        # layout knows is made of a directory's number, which is another one on each node.
        if inode.model and not inode.parent_key and facts.key == inode.key:
            inode.parent_key = facts.parent_key
        if facts.digest:
            stored = stored._replace(told=inode.told)
        batch.put(inode)
        batch.link(place.parent, Dentry(place.name, inode.ino, inode.ino))
        batch.mark(keys.STORED, inode.ino, keys.stored_value(stored))
        batch.then(partial(self.ledger.accounts.admit, inode))
        return True

    def _complete(self, inode: Inode, key: str, seen: Seen) -> None:
        before = inode.copy()
        _describe(inode, seen.facts)
        stored = seen.stored(key)._replace(told=inode.told)
        with self.catalog.batch() as batch:
            batch.put(inode)
            batch.mark(keys.STORED, inode.ino, keys.stored_value(stored))
            batch.then(partial(self.ledger.records.described, before, inode))


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

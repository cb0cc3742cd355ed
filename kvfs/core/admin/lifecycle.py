"""Creates namespaces, changes their settings, switches their version, and drops them.

Contract: every change is one catalog batch and takes effect with it, whatever a namespace holds. A
switch or a drop takes the name of the top-level directory away from its inode. From then on no path
leads to the files below. A program that is still inside finds none of them either, because they are
accounted to a dropped namespace (`Removals.is_gone`). Settings are validated here against the tiers
of the mount. All methods are synchronous. Not for the space that becomes free: `Walks`.
"""

import logging
import os
import stat
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from kvfs.catalog import ROOT_INO, Batch, Dentry, Inode, Named
from kvfs.core.admin.visitors import pin
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.names.tree import RESERVED, Tree
from kvfs.core.namespaces.namespace import Namespace, takes
from kvfs.core.namespaces.namespaces import MOUNT
from kvfs.core.namespaces.places import PIN
from kvfs.errors import ConfigError, ExistsError, NoAttributeError, NotFoundError
from kvfs.settings import Settings

log = logging.getLogger(__name__)

PREFIX = b"user.kvfs."  # attributes of a namespace's directory


def _where(ledger: Ledger, inode: Inode) -> str:
    names = [tier.name for tier in ledger.tiers.holders(inode)]
    return "+".join([*names, "s3"] if inode.in_bucket else names)


def _is_dirty(ledger: Ledger, inode: Inode) -> str:
    dirty = ledger.dirty
    if inode.ino in dirty:
        return "1"
    if inode.in_bucket or not dirty.wanted_ignoring_holes(inode):
        return "0"
    return "conflict" if inode.ino in dirty.contested else "1"


WARM = b"user.kvfs.warm"  # of files and directories: whether kvfs is to warm them


class Warmer(Protocol):
    """Brings files and trees to the fastest tier, and knows which are yet to come."""

    def start_root(self, inode: Inode) -> None: ...
    def cancel_root(self, inode: Inode) -> None: ...
    def is_wanted(self, inode: Inode) -> bool: ...


def _is_pinned(ledger: Ledger, inode: Inode) -> str:
    spaces = ledger.namespaces
    return "on" if spaces.of(inode).settings.pin or spaces.places.is_pinned(inode) else "off"


_OF_FILES: dict[bytes, Callable[[Ledger, Inode], str]] = {
    b"user.kvfs.tier": _where,
    b"user.kvfs.dirty": _is_dirty,
    PIN: _is_pinned,
}


def _raw(name: str) -> bytes:
    raw = name.encode("utf-8", "surrogateescape")
    if not raw or {0, ord("/")} & set(raw) or raw in {b".", b".."}:
        raise ConfigError(f"namespace {name!r}: expected the name of a top-level directory")
    if raw == RESERVED:
        raise ConfigError(f"namespace {name!r}: the name is kvfs's own, for its control files")
    return raw


class Lifecycle:
    """Changes namespaces. `invalidate_tree(parent, name, ino)` is told of each removed tree."""

    def __init__(
        self, tree: Tree, *, invalidate_tree: Callable[[int, bytes, int], None], warmer: Warmer
    ) -> None:
        self.tree = tree
        self.warmer = warmer
        self.ledger: Ledger = tree.ledger
        self.namespaces = tree.namespaces
        self.catalog = tree.catalog
        self.invalidate_tree = invalidate_tree

    # By name

    def directory(self, name: str) -> Inode:
        """A top-level directory, or the root for `.`. Raises NotFoundError."""
        if name == MOUNT:
            return self.tree.directory(ROOT_INO)
        raw = _raw(name)
        try:
            found = self.tree.lookup(ROOT_INO, raw)
        except NotFoundError:
            left = self.namespaces.dropped.get(self.namespaces.last_dropped(name))
            why = (
                ""
                if left is None
                else f", it was dropped, and {left.objects} objects are to go yet"
            )
            raise NotFoundError(
                f"namespace {name}: there is no such directory at the top of the mount{why}; kvfs "
                "ns create makes one"
            ) from None
        if not found.is_dir:
            kind = "symbolic link" if stat.S_ISLNK(found.mode) else "file"
            raise NotFoundError(f"namespace {name}: expected a directory, found a {kind}")
        return found

    def settings(self, directory: Inode) -> Settings:
        """The settings of the directory's namespace; without a namespace, those of the mount."""
        return self.namespaces.of(directory).settings

    # Changes

    def make(
        self, name: str, texts: Mapping[str, str], *, uid: int, gid: int, again: bool = False
    ) -> Namespace:
        """Create a namespace, or make one of a directory that has no settings yet.

        Raises ConfigError. Raises ExistsError if the directory has settings, unless this was asked
        for before (`again`), and the settings are those that the namespace would have got.
        """
        raw = _raw(name)
        try:
            directory = self.directory(name)
        except NotFoundError:
            if self.catalog.lookup(ROOT_INO, raw) is not None:
                raise
            settings = self._valid(self._new(name, texts))
            mode = stat.S_IFDIR | 0o755
            self.tree.ledger.misses.named(ROOT_INO, raw, as_directory=True)
            directory = self.tree.make(ROOT_INO, raw, mode, uid, gid, settings=settings)
            return self.namespaces.of(directory)
        settings = self._valid(Settings.parse(texts))
        own = self.namespaces.own(directory.ino)
        if own is None:
            return self._set(directory, settings)
        if again and (own.settings == settings or own.settings == self._new(name, texts)):
            return own
        raise ExistsError(
            f"namespace {name} exists: change it with kvfs ns set; kvfs ns show --for CONNECTOR "
            "prints its engine's configuration"
        )

    def _new(self, name: str, texts: Mapping[str, str]) -> Settings:
        """The settings for a new namespace: `texts` on top of its template."""
        return (self.tree.templates(name) or Settings()).changed(texts)

    def change(self, directory: Inode, texts: Mapping[str, str]) -> Namespace:
        """Change the settings of a namespace; a directory without settings becomes one.

        Raises ConfigError and changes nothing. A greater version drops everything in the namespace.
        """
        before = self.settings(directory)
        settings = before.changed(texts)
        if "media" in texts:  # an earlier mount may have had what this one lacks
            self._valid(settings)
        if "quota_hard" in texts:
            settings.check_quota()
        if settings.version < before.version:
            raise ConfigError(
                f"setting version={settings.version}: expected at least {before.version}, what it "
                "has: entries of an earlier version do not come back"
            )
        if settings.version > before.version:
            if directory.ino == ROOT_INO:
                raise ConfigError(
                    "setting version: the mount itself has none; its top-level directories have"
                )
            return self._switch(directory, settings)
        return self._set(directory, settings)

    def _valid(self, settings: Settings) -> Settings:
        settings.check_media(self.ledger.tiers.media)
        settings.check_quota()
        return settings

    def _set(self, directory: Inode, settings: Settings) -> Namespace:
        ino, before = directory.ino, self.settings(directory)
        if settings.prefix != before.prefix:
            self._check_empty(directory)
        keeps = [told.eviction == Settings().eviction for told in (before, settings)]
        with self.catalog.batch() as batch:
            if directory.namespace != ino:
                self._begin(directory, batch)
            elif keeps[0] != keeps[1]:  # a connector's files become (un)evictable
                self.namespaces.account_anew(ino, batch)
            self.namespaces.set(ino, settings, batch)
            bucket = self.ledger.tiers.bucket
            if takes(settings, bucket) and not takes(before, bucket):
                self.ledger.dirty.look_back(batch)
            batch.answers()
        self.ledger.wakeup.wake()
        found = self.namespaces.of(directory)
        note = found.note(self.ledger.tiers.local)
        if note and before.compression != settings.compression:
            log.info("namespace %s: %s", self.namespaces.name(ino), note)
        return found

    def _check_empty(self, directory: Inode) -> None:
        """Check that a directory is empty: `prefix` holds for all its paths or for none.

        Raises ConfigError.
        """
        name = self.namespaces.name(directory.ino)
        if directory.ino == ROOT_INO:
            raise ConfigError(
                "setting prefix: the mount itself has none; its top-level directories have"
            )
        if self.catalog.entries_after(directory.ino, 0, 1):
            raise ConfigError(
                f"setting prefix: namespace {name} has entries, expected a new or empty one: make "
                "another with kvfs ns create, or set it together with a greater version, which "
                "drops what is there"
            )

    def _begin(self, directory: Inode, batch: Batch) -> None:
        """Make a directory a namespace: a walk accounts everything below to it."""
        directory.namespace = directory.ino
        batch.put(directory)
        self.namespaces.account_anew(directory.ino, batch)

    def _switch(self, directory: Inode, settings: Settings) -> Namespace:
        """Give the name to an empty directory, with all attributes of the old one."""
        name = self._entry(directory)
        fresh = directory.copy()
        fresh.ino = fresh.namespace = self.catalog.next_id()
        fresh.links = ((ROOT_INO, fresh.ino),)
        fresh.subdirs = 0
        fresh.mtime_ns = fresh.ctime_ns = self.tree.now()
        with self.catalog.batch() as batch:
            self._detach(directory, name, batch, switched=True)
            batch.link(ROOT_INO, Dentry(name.name, fresh.ino, fresh.ino))
            batch.put(fresh)
            for attribute in self.catalog.xattr_names(directory.ino):
                value = self.catalog.xattr(directory.ino, attribute) or b""
                batch.set_xattr(fresh.ino, attribute, value)
            self.namespaces.set(fresh.ino, settings, batch)
            batch.then(partial(self.namespaces.count_on, directory.ino, fresh.ino))
            batch.answers()
        self.invalidate_tree(ROOT_INO, name.name, directory.ino)
        return self.namespaces.of(fresh)

    def drop(self, directory: Inode) -> None:
        """Drop a namespace with everything in it. Raises ConfigError for the mount's own."""
        if directory.ino == ROOT_INO:
            raise ConfigError("the mount's own namespace cannot be dropped: unmount, or rm -r")
        name = self._entry(directory)
        root = self.tree.directory(ROOT_INO)
        root.subdirs -= 1
        root.mtime_ns = root.ctime_ns = self.tree.now()
        with self.catalog.batch() as batch:
            self._detach(directory, name, batch, switched=False)
            batch.put(root)
        self.invalidate_tree(ROOT_INO, name.name, directory.ino)

    def _entry(self, directory: Inode) -> Dentry:
        parent, cookie = directory.links[0]
        entry = self.catalog.dentry(parent, cookie)
        if parent != ROOT_INO or entry is None:
            raise ConfigError(f"{self._named(directory)}: expected a top-level directory")
        return entry

    def _detach(self, directory: Inode, name: Dentry, batch: Batch, *, switched: bool) -> None:
        if directory.namespace != directory.ino:  # it had no settings
            self._begin(directory, batch)
        directory.links = ()
        batch.unlink(ROOT_INO, name)
        batch.put(directory)
        self.namespaces.drop(directory.ino, name.name, batch, switched=switched)
        batch.then(self.ledger.wakeup.wake)

    # Attributes

    def attribute(self, directory: Inode, name: bytes) -> bytes | None:
        """The value of `user.kvfs.NAME`: a setting, or a fact of a file. None for another name."""
        if directory.is_file and name in _OF_FILES:
            return _OF_FILES[name](self.ledger, directory).encode()
        if name == WARM and (directory.is_file or directory.is_dir):
            return b"1" if self.warmer.is_wanted(directory) else b"0"
        texts = self.settings(directory).to_text()
        text = texts.get(name.removeprefix(PREFIX).decode("ascii", "replace"))
        return None if text is None else text.encode()

    def attributes(self, directory: Inode) -> list[bytes]:
        """The attributes with settings that differ from the defaults."""
        own = self.namespaces.own(directory.ino)
        if own is None:
            return []
        default, texts = Settings().to_text(), own.settings.to_text()
        return [PREFIX + name.encode() for name, text in texts.items() if text != default[name]]

    def set_attribute(self, inode: Inode, name: bytes, value: bytes) -> None:
        """Set an attribute. Raises ConfigError, also if the inode cannot have it."""
        if name == WARM:
            self._warm(inode, value)
            return
        if name == PIN and inode.is_file:
            self._pin(inode, value)
            return
        top = inode.ino == ROOT_INO or (inode.links and inode.links[0][0] == ROOT_INO)
        if not inode.is_dir or not top:
            raise ConfigError(
                f"attribute {name.decode('ascii', 'replace')}: expected on the mount point or on a "
                "top-level directory, which are namespaces"
            )
        field = name.removeprefix(PREFIX).decode("ascii", "replace")
        self.change(inode, {field: value.decode("utf-8", "replace").removesuffix("\0")})

    def _warm(self, inode: Inode, value: bytes) -> None:
        if value not in {b"0", b"1"} or not (inode.is_file or inode.is_dir):
            raise ConfigError(
                f"attribute {WARM.decode()}: expected 1 to have a file or directory brought to its "
                "fastest tier, or 0 to end that"
            )
        if value == b"1":
            self.warmer.start_root(inode)
        else:
            self.warmer.cancel_root(inode)

    def _pin(self, inode: Inode, value: bytes) -> None:
        if value not in {b"on", b"off"}:
            raise ConfigError(
                f"attribute {PIN.decode()}={os.fsdecode(value)!r} of {self._named(inode)}: "
                "expected on or off"
            )
        pin(self.ledger, inode, on=value == b"on")

    def _named(self, inode: Inode) -> Named:
        return self.catalog.named(inode.ino)

    def reset_attribute(self, inode: Inode, name: bytes) -> None:
        """Reset an attribute to its default."""
        if name == PIN and inode.is_file:
            if not self.namespaces.places.is_pinned(inode):
                raise NoAttributeError(f"{self._named(inode)} is not pinned")
            self._pin(inode, b"off")
            return
        if name == WARM:
            self._warm(inode, b"0")
            return
        default = Settings().to_text()
        field = name.removeprefix(PREFIX).decode("ascii", "replace")
        if self.attribute(inode, name) is not None and self.namespaces.own(inode.ino) is None:
            raise NoAttributeError(f"{self._named(inode)} has no settings of its own")
        if field not in default or field == "version":
            raise ConfigError(f"setting {field}: kvfs has no default for it")
        self.set_attribute(inode, name, default[field].encode())

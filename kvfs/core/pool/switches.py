"""Drops and versions of namespaces, for all nodes of the pool.

Contract: `run` runs as long as the mount. It asks the index about each namespace once in LOOK_S
seconds, and at once when settings change here. A greater version of the index is set here, and ours
there. A drop has a token in the index: its time. The catalog has the token that each name had when
its directory was made (`pool/tokens`), so a drop is carried out once here, and not in a namespace
that is made later. If a directory was made while the index did not answer, or by a rename or from
the bucket, later drops are for it, by the clocks of the nodes. No drop concerns a directory from
before the pool until it is first compared. A drop of this node is in the catalog until the index
knows it. A top-level directory without settings learns as well, and becomes a namespace with the
first greater version. Namespaces with `pool=off` neither tell nor learn.
"""

import logging
from typing import Protocol

import trio

from kvfs.catalog import ROOT_INO, Batch, Catalog, Inode
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.core.pool.tokens import DropTokens, key_of
from kvfs.errors import KvfsError
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import PATIENCE, Index
from kvfs.pool.records import Switch

log = logging.getLogger(__name__)

LOOK_S = 1.0  # s between two questions about all namespaces
STEP = 1024  # new entries of the top in a look: some 10 ms if all are directories


class NamespaceCommands(Protocol):
    """The part of `Lifecycle` that drops and switches namespaces."""

    def directory(self, name: str) -> Inode: ...
    def change(self, directory: Inode, texts: dict[str, str]) -> Namespace: ...
    def drop(self, directory: Inode) -> None: ...


class NamespaceSwitches:
    """Drops and switches the namespaces of one mount together with those of other nodes."""

    def __init__(self, index: Index, namespaces: Namespaces, tokens: DropTokens) -> None:
        self.index = index
        self.tokens = tokens
        self.namespaces = namespaces
        self.catalog: Catalog = namespaces.catalog
        self.commands: NamespaceCommands | None = None  # once the mount serves
        self._applying = False  # what another node has told
        self._logged = ""  # the last failure
        self._top = 0  # the cookie of the last entry of the top that was looked at
        self._directories: dict[int, int] = {}  # of the top: cookies and inodes

    def dropped(self, name: str, batch: Batch) -> None:
        """Learn that a batch drops a namespace here: a command, or another node, asked for it."""
        if not self._applying:
            self.tokens.drop(name, batch)

    async def last_drop(self, name: str) -> str | None:
        """The token of the last drop of a name that gets a directory now; None: it is not sure.

        Raises IndexDownError.
        """
        if name in self.tokens.untold:
            return None
        known = self.tokens.known(name)
        (switch,) = await self.index.switches([key_of(name)], patience=PATIENCE)
        # After a drop of this node, the answer may be from before it.
        if name in self.tokens.untold or self.tokens.known(name) != known:
            return None
        return switch.dropped

    async def run(self) -> None:
        """Tell and learn, for ever."""
        while True:
            changed = self.namespaces.changed
            try:
                await self._tell_drops()
                await self._compare()
                self._logged = ""
            except IndexDownError as error:
                log.debug("drops and versions of namespaces wait: %s", error)
            except KvfsError as error:
                level = logging.DEBUG if str(error) == self._logged else logging.ERROR
                log.log(level, "a namespace does not follow the pool: %s", error)
                self._logged = str(error)
            with trio.move_on_after(LOOK_S) as scope:
                await changed.wait()
            if not scope.cancelled_caught:
                await trio.sleep(LOOK_S / 20)  # many settings may change

    async def _tell_drops(self) -> None:
        while self.tokens.untold:
            name, token = next(iter(self.tokens.untold.items()))
            self.tokens.note(name, token)
            await self.index.drop_namespace(key_of(name), token)
            self.tokens.told(name, token)

    async def _compare(self) -> None:
        self._find_directories()
        before = {name: self.tokens.known(name) for name in self._shared()}
        told = await self.index.switches([key_of(name) for name in before])
        ours, failures = self._shared(), list[KvfsError]()  # as they are now
        for (name, known), switch in zip(before.items(), told, strict=True):
            if self.tokens.known(name) != known:  # the answer may be older than the directory
                continue
            if name in ours and name not in self.tokens.untold:
                try:
                    await self._follow(name, ours[name], switch)
                except IndexDownError:
                    raise
                except KvfsError as error:  # the other namespaces follow
                    failures.append(error)
        if failures:
            raise failures[0]

    def _find_directories(self) -> None:
        """Look at entries of the top that are new."""
        for entry in self.catalog.entries_after(ROOT_INO, self._top, STEP):
            self._top = entry.cookie
            found = self.catalog.inode(entry.ino)
            if found is not None and found.is_dir and entry.ino != ROOT_INO:
                self._directories[entry.cookie] = entry.ino

    async def _follow(self, name: str, version: int, switch: Switch) -> None:
        assert self.commands is not None
        is_late = self.tokens.precedes(name, switch.dropped)
        if is_late or not self.tokens.is_compared(name):
            self.tokens.note(name, switch.dropped)
        if is_late:
            log.info("namespace %s: another node has dropped it", name)
            self._applying = True
            try:
                self.commands.drop(self.commands.directory(name))
            finally:
                self._applying = False
        elif switch.version > version:
            log.info("namespace %s: another node has set version=%d", name, switch.version)
            self.commands.change(self.commands.directory(name), {"version": str(switch.version)})
        elif switch.version < version and version > 1:
            await self.index.set_version(key_of(name), version)

    def _shared(self) -> dict[str, int]:
        """The names of top-level directories that take part, and their versions."""
        if self.commands is None:
            return {}
        spaces = {one.ino: one for one in self.namespaces if one.ino != ROOT_INO}
        found = {
            self.namespaces.name(ino): one.settings.version
            for ino, one in spaces.items()
            if one.settings.pool
        }
        mount = self.namespaces.own(ROOT_INO)
        if mount is not None and not mount.settings.pool:
            return found
        for cookie, ino in list(self._directories.items()):
            entry = self.catalog.dentry(ROOT_INO, cookie)
            if entry is None or entry.ino != ino:
                del self._directories[cookie]
            elif ino not in spaces:
                found[entry.name.decode("utf-8", "surrogateescape")] = 1
        return found

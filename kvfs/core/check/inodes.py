"""Check inodes: whether their records make sense, have names and can be reached.

Attributes and marks of inodes, and the facts of the catalog, are checked here, too.

Contract: `count` comes first, because the next steps need the number of inodes, and no number may
be given out twice. `run` comes after the names are mended. An inode that is not open must be sealed
and have a name. If a crash left an inode otherwise and the next mount will drop it, the check only
notes it.
Not for bytes.
"""

from collections import Counter
from functools import partial

from kvfs.catalog import ROOT_INO, Inode, audit, keys
from kvfs.core.check.names import NameCheck
from kvfs.core.check.namespaces import NamespaceCheck
from kvfs.core.check.stored import MarkCheck
from kvfs.core.check.survey import Survey
from kvfs.core.ledger.sessions import NUMBER


class InodeCheck:
    """Checks all inodes. It shares the results of `names`."""

    def __init__(self, survey: Survey, names: NameCheck) -> None:
        self.survey = survey
        self.catalog = survey.catalog
        self.ledger = survey.ledger
        self.names = names
        self.namespaces = NamespaceCheck(survey, names.parents)
        self.stored = MarkCheck(survey)
        self._session = self._epoch = 0  # the greatest in any record

    async def count(self) -> None:
        """Read and count every record, and report those that make no sense."""
        survey, largest = self.survey, 0
        survey.begin("records", 0)
        for key, record in self.catalog.records(keys.INODES):
            inode = audit.inode(key, record)
            if inode is None:
                self._unreadable(key)
            else:
                survey.inodes += 1
                survey.bytes += inode.data * len(self.ledger.tiers.holders(inode))
                self._session = max(self._session, inode.session)
                self._epoch = max(self._epoch, inode.ram_epoch)
                largest = max(largest, inode.ino, *(cookie for _, cookie in inode.links))
            await survey.step()
        self.names.check_counter(largest)

    def _unreadable(self, key: bytes) -> None:
        record = self.catalog.record(keys.INODES, key)
        if record is None or audit.inode(key, record) is not None:
            return  # gone or written meanwhile

        ino = keys.number(key) or 0
        self.survey.unreadable.add(ino)
        what = f"its record is invalid (key {(keys.INODES + key).hex()})"
        mend = partial(self.survey.erase, keys.INODES, key)
        self.survey.report("record", ino, "", what, "remove it: the inode is lost", mend)

    async def run(self) -> None:
        """Check links, directories, namespaces, attributes, marks and facts."""
        await self._links()
        await self.namespaces.run()
        await self._xattrs()
        await self._marks()
        await self.stored.run()
        self._facts()
        await self.survey.step()

    # Links

    async def _links(self) -> None:
        """Check links. Directories are counted in one view of all records, without later ones."""
        survey, names = self.survey, self.names
        survey.begin("links", survey.inodes)
        directories: dict[int, tuple[int, int]] = {}  # inode -> parent, subdirs
        for key, record in self.catalog.records(keys.INODES):
            ino = keys.number(key)
            if ino is not None and ino not in survey.unreadable:
                seen = Inode.unpack(ino, record)
                if seen.is_dir:
                    parent = seen.links[0][0] if seen.links else names.parents.get(seen.ino, 0)
                    directories[seen.ino] = parent, seen.subdirs
                self.namespaces.suspect(seen)
                current = survey.inode(ino)
                if current is not None and current.ino != ROOT_INO:
                    self._check(current)
                    self.stored.check_inode(current)
            await survey.step()
        counted = Counter(parent for ino, (parent, _) in directories.items() if ino != ROOT_INO)
        counted.update(p for ino, p in names.parents.items() if ino not in directories)
        for ino, (_, subdirs) in directories.items():
            if counted[ino] != subdirs:
                self._miscounted(ino, counted[ino] - subdirs)
            await survey.step(0)
        await self._unreachable({ino: parent for ino, (parent, _) in directories.items()})

    def _check(self, inode: Inode) -> None:
        survey, ino = self.survey, inode.ino
        wrong = [link for link in inode.links if (ino, *link) in survey.said]
        valid = self.names.valid_links(inode)
        if inode.links and not wrong and valid != inode.links:
            self._mislinked(inode, valid)
        elif not inode.links and (ino, "adopted") not in survey.said:
            self._check_nameless(inode)
        elif inode.is_file and not inode.sealed and inode.links:
            self._check_unsealed(inode)

    def _mislinked(self, inode: Inode, valid: tuple[tuple[int, int], ...]) -> None:
        """Report an inode whose record has missing names, or the same name twice."""

        def mend() -> None:
            if valid:
                inode.links = valid
                self.survey.put(inode)
            else:
                self.names.to_lost_found(inode)

        lost = [link for link in inode.links if link not in valid]
        what = "it counts a name twice, or is a directory with two"
        if lost:
            what = "of its names there is no entry " + ", ".join(
                f"{cookie} in directory {parent}" for parent, cookie in lost
            )
        cure = "forget that" if valid else f"it becomes /lost+found/{inode.ino}"
        self.survey.report_inode("link", inode, what, cure, mend)

    def _check_nameless(self, inode: Inode) -> None:
        """Report a nameless inode, unless it may be nameless.

        An inode may be nameless if it was unlinked while it was open, also before a crash. The top
        directory of a dropped tree may be nameless, too.
        """
        survey, ino = self.survey, inode.ino
        if survey.in_use(ino) or survey.to_be_recovered(ino) or survey.dropped(ino):
            return
        if survey.marked(ino) or (inode.is_file and not inode.sealed):
            removals = self.ledger.removals
            forget = partial(survey.change, partial(removals.forget, inode, accounted=False))
            what = "it was unlinked or never sealed, and nobody has it open"
            survey.said.add((ino, "marked"))
            survey.report("nameless", ino, "(no name)", what, "remove it", forget)
        else:
            what, cure = "no directory has an entry for it", f"it becomes /lost+found/{ino}"
            mend = partial(self.names.to_lost_found, inode)
            survey.report("nameless", ino, "(no name)", what, cure, mend)

    def _check_unsealed(self, inode: Inode) -> None:
        survey, ino = self.survey, inode.ino
        if survey.in_use(ino) or survey.to_be_recovered(ino):
            return
        survey.said.add((ino, "marked"))
        what = "it was never sealed, and nobody writes it"
        drop = partial(self.ledger.removals.drop, inode, "unfinished")
        survey.report_inode("unfinished", inode, what, "drop it with its names", drop)

    # Directories

    def _miscounted(self, ino: int, difference: int) -> None:
        directory = self.survey.inode(ino)
        if directory is None:
            return  # removed meanwhile

        def mend() -> None:
            directory.subdirs += difference
            self.survey.put(directory)

        found, wanted = directory.subdirs, directory.subdirs + difference
        what = f"it counts {found} directories in it, there are {wanted}"
        self.survey.report_inode("directory", directory, what, "correct the number", mend)

    async def _unreachable(self, parents: dict[int, int]) -> None:
        """Report directories that are below themselves. `_check` finds those without an entry."""
        survey, good = self.survey, {ROOT_INO}
        for ino in parents:
            way: dict[int, None] = {}
            at = ino
            while at in parents and at not in good and at not in way:
                way[at] = None
                at = parents[at]
            if at in way and (cycle := self._cycle(at)):
                inode = survey.inode(min(cycle))
                assert inode is not None  # _cycle has seen it
                what = f"it is below itself: {', '.join(map(str, sorted(cycle)))}"
                cure, mend = f"it becomes /lost+found/{inode.ino}", partial(self._cut, inode)
                survey.report("directory", inode.ino, "(unreachable)", what, cure, mend)
            good.update(way)
            await survey.step(0)

    def _cycle(self, ino: int) -> set[int]:
        """Return the directories of a cycle; an empty set if the cycle is gone."""
        found: set[int] = set()
        while ino not in found:
            inode = self.survey.inode(ino)
            if inode is None or not inode.links or ino == ROOT_INO:
                return set()
            found.add(ino)
            ino = inode.links[0][0]
        return found

    def _cut(self, inode: Inode) -> None:
        ((parent, cookie),) = inode.links
        entry = self.catalog.dentry(parent, cookie)
        if entry is not None:
            self.survey.remove(parent, entry)
        self.names.to_lost_found(inode)

    # Attributes and marks

    async def _xattrs(self) -> None:
        survey = self.survey
        survey.begin("attributes", 0)
        for key, _ in self.catalog.records(keys.XATTRS):
            found = audit.xattr(key)
            if found is None or survey.inode(found[0]) is None:
                ino, name = found or (0, key)
                what = f"there is no inode that has the attribute {name!r}"
                mend = partial(survey.erase, keys.XATTRS, key)
                survey.report("attribute", ino, "", what, "remove it", mend)
            await survey.step()

    async def _marks(self) -> None:
        """Check the marks of inodes that the next mount drops if this one dies."""
        survey = self.survey
        survey.begin("marks", 0)
        for key, _ in self.catalog.records(keys.MARKS):
            if self.catalog.record(keys.MARKS, key) is not None:
                self._check_mark(key)
            await survey.step()

    def _check_mark(self, key: bytes) -> None:
        survey, ino = self.survey, keys.number(key)
        inode = None if ino is None else survey.inode(ino)
        if ino is None or inode is None:
            what = "there is no such inode that could be unfinished"
        elif (ino, "marked") in survey.said or survey.in_use(ino):
            return
        elif survey.live and inode.sealed and inode.links:
            what = "it is marked as unfinished, but is sealed and has a name"
        else:
            survey.notes["unfinished"] += not survey.live
            return
        path = "" if inode is None else survey.path(inode)
        mend = partial(survey.erase, keys.MARKS, key)
        survey.report("mark", ino or 0, path, what, "remove the mark", mend)

    # Facts

    def _facts(self) -> None:
        """Check the facts that a mount reads first. A fact that no record needs may be missing."""
        least = {"session": self._session, "ram_epoch": self._epoch, "clean": 0}
        for name, number in least.items():
            found = self.catalog.fact(name)
            if found is None and not number:
                continue
            if found is None or not NUMBER.fullmatch(found) or int(found) < number:
                expected = f"a number not below {number}, which a record has"
                self._wrong_fact(name, found, expected if number else "a number", str(number))
        found = self.catalog.fact("suspect")
        if found is not None and len([*filter(NUMBER.fullmatch, found.split(" "))]) != 2:  # noqa: PLR2004
            # As if all sessions had ended with a power loss: digests are compared once more.
            self._wrong_fact("suspect", found, "two numbers of sessions", f"1 {self._session}")

    def _wrong_fact(self, name: str, found: str | None, expected: str, value: str) -> None:
        what = f"the fact {name} is {found!r}, expected {expected}"
        mend = partial(self.survey.change, lambda batch: batch.set_fact(name, value))
        self.survey.report("fact", 0, "", what, f"set it to {value!r}", mend)

"""Check names against inodes: directory entries, their inodes, and the links back.

Contract: an entry is right if it is found by its cookie and by its name, lies in a directory, and
its inode lists it. A repair keeps every inode that can be kept. If an inode has no other name, an
entry that it does not list becomes its name. An inode whose name is not known any more goes to
/lost+found, named by its number. Not for the other fields of an inode.
"""

import os
import stat
from collections.abc import Iterator
from functools import partial

from kvfs.catalog import ROOT_INO, Batch, Dentry, Inode, audit, keys
from kvfs.core.check.namespaces import LOST, home
from kvfs.core.check.survey import Survey
from kvfs.core.names.tree import COOKIE_SELF, Tree


class NameCheck:
    """Checks all entries.

    `parents` has the parents of directories whose records are missing, or do not have the parent.
    """

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.catalog = survey.catalog
        self.tree = Tree(survey.ledger)
        self.parents: dict[int, int] = {}

    async def run(self) -> None:
        """Check all entries: by cookie, then by name."""
        survey = self.survey
        survey.begin("names", 2 * survey.inodes)
        largest = 0
        for key, value in self.catalog.records(keys.COOKIES):
            found = audit.by_cookie(key, value)
            if found is not None:
                largest = max(largest, found[1].cookie)
            self._by_cookie(key)
            await survey.step()
        self.check_counter(largest)
        for key, _ in self.catalog.records(keys.NAMES):
            self._by_name(key)
            await survey.step()

    def check_counter(self, largest: int) -> None:
        """Report a counter that would give out a number twice, and so make two objects one."""
        counter = self.catalog.counter
        if largest >= counter and ("counter", largest) not in self.survey.said:
            self.survey.said.add(("counter", largest))
            what = f"the next number is {counter}, but {largest} is in use"
            mend = partial(self.catalog.count_from, largest + 1)
            self.survey.report("counter", 0, "", what, f"go on from {largest + 1}", mend)

    def check_root(self) -> None:
        """Check the root. This comes before all names, because their repair may need it."""
        root = self.survey.inode(ROOT_INO)
        links = ((ROOT_INO, COOKIE_SELF),)
        if root is None or not root.is_dir:
            self.parents[ROOT_INO] = ROOT_INO
            why = "has no record that makes sense" if root is None else "is no directory"
            rebuild = partial(self._rebuild, ROOT_INO, links)
            self.survey.report(
                "directory", ROOT_INO, "/", f"the root {why}", "make it anew", rebuild
            )
        elif root.links != links:

            def mend() -> None:
                root.links = links
                self.survey.put(root)

            what = "the root has another parent"
            self.survey.report("directory", ROOT_INO, "/", what, "correct it", mend)

    # Entries

    def _entry(self, parent: int, cookie: int) -> Dentry | None:
        key = keys.cookie_key(parent, cookie)
        value = self.catalog.record(keys.COOKIES, key)
        found = None if value is None else audit.by_cookie(key, value)
        return None if found is None else found[1]

    def _named(self, parent: int, name: bytes) -> Dentry | None:
        key = keys.name_key(parent, name)
        value = self.catalog.record(keys.NAMES, key)
        found = None if value is None else audit.by_name(key, value)
        return None if found is None else found[1]

    def _entries(self, ino: int) -> Iterator[Dentry]:
        """Yield the entries of a directory that make sense."""
        for key, value in self.catalog.records(keys.COOKIES, keys.number_key(ino)):
            found = audit.by_cookie(key, value)
            if found is not None:
                yield found[1]

    def valid_links(self, inode: Inode) -> tuple[tuple[int, int], ...]:
        """Return each link once whose entry leads back to the inode; for a directory, the first."""
        found = [
            link
            for link in dict.fromkeys(inode.links)
            if (entry := self._entry(*link)) is not None and entry.ino == inode.ino
        ]
        return tuple(found[:1] if inode.is_dir else found)

    def _unreadable(self, kind: bytes, key: bytes) -> None:
        what = f"a directory entry is invalid (key {(kind + key).hex()})"
        self.survey.report(
            "record", 0, "", what, "remove it", partial(self.survey.erase, kind, key)
        )

    def _by_cookie(self, key: bytes) -> None:
        value = self.catalog.record(keys.COOKIES, key)
        if value is None:
            return  # gone meanwhile
        found = audit.by_cookie(key, value)
        if found is None:
            self._unreadable(keys.COOKIES, key)
        elif self._check_directory(*found) and self._check_target(*found):
            self._check_index(*found)

    def _check_directory(self, parent: int, entry: Dentry) -> bool:
        """Check that the entry lies in a directory, perhaps one that is made anew."""
        directory = self.survey.inode(parent)
        if directory is None:
            if parent not in self.parents:
                self._report_rebuilt(parent, ())
        elif not directory.is_dir and parent not in self.parents:
            self._misplaced(parent, entry, f"inode {parent} is no directory, and cannot have it")
            return False
        return True

    def _misplaced(self, parent: int, entry: Dentry, why: str) -> None:
        """Report an entry that cannot stay, and keep its inode."""
        survey = self.survey
        inode = survey.inode(entry.ino)
        others = () if inode is None else self.valid_links(inode)
        only = (
            inode is not None
            and not survey.unlinked(inode)
            and set(others) <= {(parent, entry.cookie)}
        )

        def mend() -> None:
            with self.catalog.batch() as batch:
                batch.erase(keys.COOKIES, keys.cookie_key(parent, entry.cookie))
                if self._named(parent, entry.name) == entry:
                    batch.erase(keys.NAMES, keys.name_key(parent, entry.name))
            survey.ledger.invalidate_name(parent, entry.name, entry.ino)
            if inode is not None and only:
                self.to_lost_found(inode)
            elif inode is not None:
                inode.links = tuple(x for x in inode.links if x != (parent, entry.cookie))
                survey.put(inode)

        cure = f"it becomes /lost+found/{entry.ino}" if only else "remove the entry"
        survey.said.add((entry.ino, parent, entry.cookie))
        survey.report("name", entry.ino, survey.entry_path(parent, entry.name), why, cure, mend)

    def _check_target(self, parent: int, entry: Dentry) -> bool:
        """Check that the entry stands for an inode that lists it. Returns whether it stays."""
        survey = self.survey
        inode, link = survey.inode(entry.ino), (parent, entry.cookie)
        if inode is not None and link in inode.links:
            return True
        path = survey.entry_path(parent, entry.name)

        remove = partial(survey.remove, parent, entry)
        if inode is None:
            if next(self._entries(entry.ino), None):
                self._report_rebuilt(entry.ino, (link,))
                return True
            what = f"it stands for inode {entry.ino}, which is not there"
            survey.report("name", entry.ino, path, what, "remove the entry", remove)
            return False
        what = f"inode {entry.ino} does not know of this name"
        if self._unwanted(inode):
            survey.report("name", entry.ino, path, what, "remove the entry", remove)
            return False
        self._to_be_adopted(inode, parent)
        adopt = partial(self._adopt, inode, link)
        survey.report("name", entry.ino, path, what, "make it its name", adopt)
        return True

    def _unwanted(self, inode: Inode) -> bool:
        """Whether the inode has a name, or is meant to have none."""
        return self.survey.unlinked(inode) or inode.ino == ROOT_INO or bool(self.valid_links(inode))

    def _to_be_adopted(self, inode: Inode, parent: int) -> None:
        self.survey.said.add((inode.ino, "adopted"))
        if inode.is_dir:
            self.parents[inode.ino] = parent

    def _adopt(self, inode: Inode, link: tuple[int, int]) -> None:
        inode.links = (*self.valid_links(inode), link)
        self.survey.put(inode)

    def _check_index(self, parent: int, entry: Dentry) -> None:
        """Check that the name leads to the same entry as the cookie."""
        survey, other = self.survey, self._named(parent, entry.name)
        if other == entry:
            return
        if (
            other is not None
            and other.cookie != entry.cookie
            and self._entry(parent, other.cookie) == other
            and (inode := survey.inode(other.ino)) is not None
            and (parent, other.cookie) in inode.links
        ):
            self._misplaced(parent, entry, f"inode {other.ino} has the same name")
            return
        survey.said.add((parent, entry.name))

        mend = partial(survey.change, lambda batch: batch.link(parent, entry))
        what = "it is listed, but cannot be looked up"
        if other is not None:
            what = f"it is listed as inode {entry.ino}, but looked up as {other.ino}"
        path, cure = survey.entry_path(parent, entry.name), "make it be found as it is listed"
        survey.report("name", entry.ino, path, what, cure, mend)

    def _by_name(self, key: bytes) -> None:
        survey = self.survey
        value = self.catalog.record(keys.NAMES, key)
        if value is None:
            return  # gone meanwhile
        found = audit.by_name(key, value)
        if found is None:
            self._unreadable(keys.NAMES, key)
            return
        parent, entry = found
        listed = self._entry(parent, entry.cookie)
        if listed == entry or (parent, entry.name) in survey.said:
            return
        inode = survey.inode(entry.ino)
        link = (parent, entry.cookie)
        directory = survey.inode(parent)
        keep = (
            listed is None
            and directory is not None
            and directory.is_dir
            and inode is not None
            and (link in inode.links or not self._unwanted(inode))
        )

        def restore() -> None:
            survey.change(lambda batch: batch.link(parent, entry))
            assert inode is not None  # `keep` is true
            if link not in inode.links:
                self._adopt(inode, link)

        def remove() -> None:
            survey.erase(keys.NAMES, key)
            survey.ledger.invalidate_name(parent, entry.name, entry.ino)

        path = survey.entry_path(parent, entry.name)
        what = f"it can be looked up, but is not listed as inode {entry.ino}"
        survey.said.add((entry.ino, *link))
        if keep and inode is not None:
            if link not in inode.links:
                self._to_be_adopted(inode, parent)
            survey.report("name", entry.ino, path, what, "list it again", restore)
        else:
            survey.report("name", entry.ino, path, what, "remove it", remove)

    # Directories made anew, and names made up

    def _report_rebuilt(self, ino: int, links: tuple[tuple[int, int], ...]) -> None:
        self.parents[ino] = links[0][0] if links else 0
        what = "it has entries, but no record that makes sense"
        cure, mend = "make the directory anew, with mode 0755", partial(self._rebuild, ino, links)
        self.survey.report("directory", ino, "", what, cure, mend)

    def _rebuild(self, ino: int, links: tuple[tuple[int, int], ...]) -> None:
        made = self.tree.new(stat.S_IFDIR | 0o755, os.geteuid(), os.getegid())
        made.ino, made.links = ino, links
        self.survey.unreadable.discard(ino)
        inodes = (self.survey.inode(entry.ino) for entry in self._entries(ino))
        made.subdirs = sum(inode is not None and inode.is_dir for inode in inodes)
        made.namespace = home(self.survey, made) or ROOT_INO
        self.survey.put(made)

    def to_lost_found(self, inode: Inode) -> None:
        """Give an inode a name in /lost+found. The caller removes its old entries."""
        directory = self._lost_found()
        name = b"%d" % inode.ino
        while self._named(directory.ino, name) is not None:
            name += b"."
        entry = Dentry(name, inode.ino, self.catalog.next_id())
        former = inode.links[0][0] if inode.links else 0
        if inode.is_dir and former != directory.ino:
            directory.subdirs += 1
            parent = self.survey.inode(former)
            if parent is not None and parent.is_dir:
                parent.subdirs -= 1
                self.survey.put(parent)
        accounted, before = self.survey.ledger.accounts.accounted(inode), inode.copy()
        inode.links = ((directory.ino, entry.cookie),)
        with self.catalog.batch() as batch:
            batch.link(directory.ino, entry)
            if self._leaves(inode, directory, batch) and accounted:
                batch.then(partial(self.survey.ledger.accounts.dismiss, before))
                batch.then(partial(self.survey.ledger.accounts.count_anew, inode))
            batch.unmark(keys.UNPUBLISHED, inode.ino)
            batch.put(inode)
            batch.put(directory)

    def _leaves(self, inode: Inode, directory: Inode, batch: Batch) -> bool:
        """Account the inode to its new directory's namespace; a namespace stays its own.

        Returns whether the inode changes its namespace.
        """
        namespaces = self.survey.ledger.namespaces
        if namespaces.own(inode.ino) or inode.namespace == directory.namespace:
            return False
        inode.namespace = directory.namespace
        if inode.is_dir:
            namespaces.account_anew(inode.ino, batch)
        return True

    def _lost_found(self) -> Inode:
        name = LOST
        while (entry := self._named(ROOT_INO, name)) is not None:
            found = self.survey.inode(entry.ino)
            if found is not None and found.is_dir:
                return found
            name += b"."
        mode = stat.S_IFDIR | 0o700
        return self.tree.make(ROOT_INO, name, mode, os.geteuid(), os.getegid())

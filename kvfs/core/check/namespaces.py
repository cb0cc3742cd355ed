"""Check which namespaces inodes are accounted to, and the marks of namespaces.

Contract: an inode is accounted to the namespace in which it lies, unless a walk has yet to do that.
A dropped tree that no walk has passed yet is right as it is; its top directory has no name.
`suspect` is called for every inode, and costs two look-ups. `run` looks at suspects again, then at
the marks, once names and links are mended. A dropped object stays dropped: an open is a miss, and
never returns bytes that a user has declared wrong. Not for the marks of unfinished inodes
(`InodeCheck`).
"""

from collections.abc import Callable, Container
from functools import partial

from kvfs.catalog import ROOT_INO, Batch, Inode, audit, keys
from kvfs.core.check.survey import Survey
from kvfs.errors import ConfigError
from kvfs.settings import Settings

LOST = b"lost+found"

_Check = Callable[[Inode | None, bytes], str]
_Forget = Callable[[int, Batch], None]


def home(survey: Survey, inode: Inode, known: dict[int, int | None] | None = None) -> int | None:
    """Return the namespace in which the inode's first name lies; None if that is not known yet.

    It is not known if the way up leads into a dropped tree, into a tree that is yet to be accounted
    anew, or in a circle.

    known: the homes of directories; the directories on the way are added. So the way up from a
    directory ends at the first known one, at any depth.
    """
    known = {} if known is None else known
    namespaces, at, way = survey.ledger.namespaces, inode, dict[int, None]()
    found = None
    while at.ino not in way:
        if at.ino in known:
            found = known[at.ino]
            break
        way[at.ino] = None
        if at.ino == ROOT_INO:
            found = ROOT_INO
            break
        if at.ino in namespaces.dropped or not at.links:
            break
        if namespaces.own(at.ino) and at_top(survey, at):
            found = at.ino
            break
        parent = survey.inode(at.links[0][0])
        if parent is None or parent.ino in namespaces.unaccounted:
            break
        at = parent
    if not inode.is_dir:  # a file may have other names, elsewhere
        del way[inode.ino]
    known.update(dict.fromkeys(way, found))
    return found


def at_top(survey: Survey, directory: Inode) -> bool:
    """Whether the directory is at the top, where namespaces are, or in /lost+found."""
    parent = directory.links[0][0]
    if not directory.is_dir or parent == ROOT_INO:
        return directory.is_dir
    above = survey.inode(parent)
    if above is None or not above.links or above.links[0][0] != ROOT_INO:
        return False
    entry = survey.catalog.record(keys.COOKIES, keys.cookie_key(*above.links[0]))
    return entry is not None and entry[8:].startswith(LOST)


class NamespaceCheck:
    """Checks namespaces and their marks.

    `rebuilt` are directories whose records are to be made anew; they keep their marks.
    """

    def __init__(self, survey: Survey, rebuilt: Container[int]) -> None:
        self.survey = survey
        self._rebuilt = rebuilt
        self.catalog = survey.catalog
        self.ledger = survey.ledger
        self.namespaces = survey.ledger.namespaces
        self.prefixes = survey.ledger.prefixes
        # The known homes of directories. Beside a mount, directories may have moved since, so a
        # suspect is looked at anew.
        self._homes: dict[int, int | None] = {}
        self._reports = 0  # the number of reports when the homes were last cleared
        self._suspects: list[int] = []
        self._models: set[int | None] = {
            audit.model(key, value) for key, value in self.catalog.records(keys.MODELS)
        }

    def suspect(self, inode: Inode) -> None:
        """Note an inode to be looked at again, if it seems to be accounted wrongly."""
        if not inode.links:
            return
        if self.survey.repair and self._reports != self.survey.reports:
            self._homes.clear()  # mended directories may lie elsewhere now
            self._reports = self.survey.reports
        expected = home(self.survey, inode, self._homes)
        unknown = inode.model and inode.model not in self._models
        prefix = inode.is_dir and inode.key and self.namespaces.prefixes
        if prefix or unknown or (expected is not None and inode.namespace != expected):
            self._suspects.append(inode.ino)

    async def run(self) -> None:
        """Check suspects, then marks: when a wrong namespace loses its mark, it holds no inode."""
        survey = self.survey
        survey.begin("namespaces", len(self._suspects))
        self._homes.clear()
        for ino in self._suspects:
            inode = survey.inode(ino)
            if inode is not None and inode.links:
                self._check_namespace(inode)
                self._check_model(inode)
                self._check_prefix(inode)
            await survey.step()
        # By kind: the function that finds the fault of a mark, and the one that forgets it in
        # memory as well.
        checks: dict[bytes, tuple[_Check, _Forget]] = {
            keys.SETTINGS: (self._check_settings, self.namespaces.forget),
            keys.DROPPED: (self._check_dropped, self.namespaces.end_drop),
            keys.UNACCOUNTED: (self._check_unaccounted, self.namespaces.end_account_anew),
            keys.GOING: (self._check_going, self.prefixes.end),
            keys.UNPUBLISHED: (self._check_unpublished, lambda _ino, _batch: None),
        }
        for kind, (check, forget) in checks.items():
            for key, _ in self.catalog.records(kind):
                value, ino = self.catalog.record(kind, key), keys.number(key) or 0
                lost = ino in self._rebuilt and survey.inode(ino) is None
                inode = survey.inode(ino) if ino else None
                if value is not None and not lost and (what := check(inode, value)):
                    self._report(kind, key, what, partial(forget, ino))
                await survey.step(0)
        for key, _ in self.catalog.records(keys.MODELS):
            value = self.catalog.record(keys.MODELS, key)
            if value is not None and audit.model(key, value) is None:
                what = f"a model's name is invalid (key {(keys.MODELS + key).hex()})"
                mend = partial(survey.erase, keys.MODELS, key)
                survey.report("record", 0, "", what, "remove it", mend)
            await survey.step(0)

    # Inodes

    def _check_namespace(self, inode: Inode) -> None:
        survey, found = self.survey, inode.namespace
        known = None if survey.live else self._homes
        homes = [home(survey, self._with_link(inode, link), known) for link in inode.links]
        expected = homes[0]
        if expected is None or None in homes or found in homes:
            return
        if found in self.namespaces.dropped:
            why = "which was dropped"
        elif self.namespaces.own(found):
            why = "but does not lie there"
        else:
            why = "which is not there"
        what = f"it is accounted to namespace {found}, {why}"
        cure = f"account it to {expected}, where it lies"
        mend = partial(self._change, inode, namespace=expected)
        survey.report_inode("namespace", inode, what, cure, mend)

    @staticmethod
    def _with_link(inode: Inode, link: tuple[int, int]) -> Inode:
        """Copy the inode with one link: a file may have more, which a walk has yet to part."""
        if len(inode.links) == 1:
            return inode
        one = inode.copy()
        one.links = (link,)
        return one

    def _check_model(self, inode: Inode) -> None:
        if not inode.model:
            return
        key = keys.number_key(inode.model)
        value = self.catalog.record(keys.MODELS, key)
        if value is None or audit.model(key, value) is None:
            what = f"it is of model {inode.model}, and there is no such number"
            mend = partial(self._change, inode, model=0)
            self.survey.report_inode("model", inode, what, "forget the model", mend)

    def _change(self, inode: Inode, **changes: int) -> None:
        ledger, before = self.ledger, inode.copy()
        for name, value in changes.items():
            setattr(inode, name, value)
        with self.catalog.batch() as batch:
            batch.put(inode)
            batch.then(self.namespaces.places.forget_paths)
            if ledger.accounts.accounted(inode):
                batch.then(partial(ledger.accounts.dismiss, before))
                batch.then(partial(ledger.accounts.count_anew, inode))

    # Marks

    def _report(self, kind: bytes, key: bytes, what: str, forget: Callable[[Batch], None]) -> None:
        """Report a mark of an inode that cannot have it; a repair removes it, in memory as well."""
        ino = keys.number(key) or 0
        inode = self.survey.inode(ino) if ino else None

        def mend() -> None:
            with self.catalog.batch() as batch:
                batch.erase(kind, key)
                if len(key) == len(keys.number_key(0)):
                    forget(batch)

        path = "" if inode is None else self.survey.path(inode)
        self.survey.report("mark", ino, path, what, "remove the mark", mend)

    def _check_settings(self, inode: Inode | None, value: bytes) -> str:
        survey = self.survey
        if inode is None:
            return "there is no such directory that could have settings"
        if survey.unlinked(inode) or (inode.links and not at_top(survey, inode)):
            return "it has settings, but is no top-level directory"
        try:
            Settings.from_json(value.decode(errors="replace"))
        except ConfigError as error:
            mend = partial(survey.change, partial(self.namespaces.set, inode.ino, Settings()))
            survey.report_inode("settings", inode, str(error), "give it the default settings", mend)
        return ""

    def _check_dropped(self, inode: Inode | None, value: bytes) -> str:
        if inode is None or not inode.is_dir or inode.ino == ROOT_INO:
            return "there is no such directory that could have been dropped"
        if inode.links:
            what, cure = "it was dropped, but has a name", "take its name away: it stays dropped"
            self.survey.report_inode("mark", inode, what, cure, partial(self._take_name, inode))
        elif audit.dropped(value) is None:
            what = "it was dropped, and the name that it had is invalid"
            forget = partial(self.namespaces.forget_name, inode.ino)
            cure, mend = "forget the name: it stays dropped", partial(self.survey.change, forget)
            self.survey.report("mark", inode.ino, "", what, cure, mend)
        return ""

    def _take_name(self, inode: Inode) -> None:
        ((parent, cookie),) = inode.links
        entry, directory = self.catalog.dentry(parent, cookie), self.survey.inode(parent)
        inode.links = ()
        with self.catalog.batch() as batch:
            batch.put(inode)
            if directory is not None:
                directory.subdirs -= 1
                batch.put(directory)
            if entry is not None:
                batch.unlink(parent, entry)
        if entry is not None:
            self.ledger.invalidate_name(parent, entry.name, inode.ino)

    def _check_unaccounted(self, inode: Inode | None, _: bytes) -> str:
        if inode is None or not inode.is_dir:
            return "there is no such directory whose content could be accounted anew"
        return ""

    def _check_going(self, inode: Inode | None, _: bytes) -> str:
        if inode is None or not inode.is_dir:
            return "there is no such directory that could go with its block"
        if inode.links and self.prefixes.is_there(inode):
            return "its block is gone, it says, but it is there"
        return ""

    def _check_prefix(self, inode: Inode) -> None:
        """Check that a block's directory exists as long as the block, or is marked."""
        if not inode.is_dir or not inode.key or inode.ino in self.prefixes.going:
            return
        if not self.prefixes.is_of_block(inode) or self.prefixes.is_there(inode):
            return
        what, cure = "its block is not there", "it goes, with all that follows, in the next mount"
        cure = cure if not self.survey.live else "it goes, with all that follows"
        mend = partial(self.prefixes.mark, inode)
        self.survey.report_inode("prefix", inode, what, cure, mend)

    def _check_unpublished(self, inode: Inode | None, value: bytes) -> str:
        if inode is None or not inode.is_file:
            return "there is no such file that could be published"
        if inode.links:
            return "it is to be published, but has a name"
        if audit.publication(value) is None:
            return "it is to be published under an invalid name"
        return ""

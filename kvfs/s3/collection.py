"""Garbage collection of a prefix: one pass looks, and one pass deletes what is still garbage.

Contract: `look` changes nothing. It holds no more than one page of a listing (and the hashes of
names that are too long for keys). `delete` lists the garbage that `look` found again. It judges
each page by the nodes' records of that moment, right before the request that deletes it. It never
touches an object written after the pass began, by the store's clock. Two collections at once delete
the same objects. docs/s3.md has the results of races with other nodes; the worst is a miss. Raises
StoreError. Not for the rules: `garbage`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvfs.errors import ConfigError
from kvfs.s3.errors import MetadataError, NoObjectError, WrongBytesError
from kvfs.s3.garbage import GARBAGE, GarbageVerdict, KeyKind, Own, Rules
from kvfs.s3.keys import Keys, ObjectName, Space
from kvfs.s3.nodes import Node, Nodes, key_of
from kvfs.s3.store import Entry, pages
from kvfs.s3.transfer import StoreTransfers

EXAMPLES = 20  # that a report has
_NAME_MAX = 64 << 10  # bytes of a record of a name
_READERS = 8  # of them at once

TellProgress = Callable[[str, int], None]  # the activity, and a count of its progress


@dataclass(slots=True)
class Tally:
    """Counts and bytes. Uploads that were cut short count as objects without bytes."""

    objects: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        self.objects += 1
        self.bytes += size


@dataclass(slots=True)
class NamespaceGarbage:
    """Garbage of a namespace in a version that no node has. `recent`: something was written lately.

    explained: some node's record says that the version once was there.
    """

    kind: KeyKind
    explained: bool
    recent: bool = False
    tally: Tally = field(default_factory=Tally)


@dataclass(slots=True)
class Report:
    """The result of `look`; see `as_json`. Times are the store's."""

    now: float
    nodes: list[Node]
    unread: dict[str, str]
    stale: list[str]
    listed: Tally = field(default_factory=Tally)
    spaces: dict[Space, NamespaceGarbage] = field(default_factory=dict)
    garbage: dict[str, Tally] = field(default_factory=dict)
    withheld: dict[str, Tally] = field(default_factory=dict)
    kept: dict[str, Tally] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)  # foreign and nameless keys
    deleted: Tally = field(default_factory=Tally)
    failed: list[str] = field(default_factory=list)
    failures: int = 0

    @property
    def unexplained(self) -> list[Space]:
        """Namespaces and versions that, by all records, no node ever had."""
        return sorted(space for space, found in self.spaces.items() if not found.explained)


class Collector:
    """One collection. It calls `own` before each page that it deletes; see `Own`.

    older_than: seconds since an object was written. node_age: seconds since a node's record was
    written; an older node is called stale. forget: nodes that are gone for good. Raises ConfigError
    for a node to forget that is not gone.
    """

    def __init__(
        self,
        transfers: StoreTransfers,
        keys: Keys,
        own: Callable[[], Own],
        *,
        older_than: float,
        node_age: float,
        forget: Collection[str] = (),
        tell: TellProgress = lambda _what, _done: None,
    ) -> None:
        self.transfers = transfers
        self.store = transfers.store
        self.keys = keys
        self.older_than = older_than
        self.node_age = node_age
        self.forget = frozenset(forget)
        self._own = own
        self._tell = tell
        self._nodes = Nodes(transfers, keys)
        self._hashes: set[str] = set()
        self._began = self.store.clock()
        self._cutoff = self._began - older_than

    # Looking

    def look(self) -> Report:
        """List the prefix and judge all keys.

        Raises ConfigError for a node that cannot be forgotten.
        """
        nodes = self._nodes.look()
        own = self._own()
        self._check_forgotten(nodes, own)
        stale = [one.identity for one in nodes if self._is_stale(one)]
        report = Report(self._began, nodes, dict(self._nodes.unread), stale)
        rules = Rules(self.keys, nodes, own, self.forget)
        self._hashes = set()
        for page in pages(self.store, self.keys.prefix):
            for entry, name in self._named(page.entries):
                report.listed.add(entry.size)
                self._enter(report, rules, entry, rules.of(entry, name, self._hashes))
            self._tell("listing", report.listed.objects)
        for upload in self.store.uploads(self.keys.prefix):
            if not self._is_ours(upload.key):
                into, why = report.kept, "foreign"
            elif upload.upload_id in own.uploads or upload.begun > self._cutoff:
                into, why = report.withheld, "recent"
            else:
                into, why = report.garbage, "upload"
            into.setdefault(why, Tally()).add(0)
        for found in report.spaces.values():
            into = report.withheld if found.recent else report.garbage
            total = into.setdefault("recent" if found.recent else found.kind, Tally())
            total.objects += found.tally.objects
            total.bytes += found.tally.bytes
        return report

    def _is_stale(self, node: Node) -> bool:
        return node.refreshed <= self._began - self.node_age

    def _check_forgotten(self, nodes: list[Node], own: Own) -> None:
        known = {node.identity: node for node in nodes}
        for identity in sorted(self.forget - self._nodes.unread.keys()):
            node = known.get(identity)
            if node is None:
                raise ConfigError(
                    f"node {identity} has no record; there are {', '.join(known) or 'none'}"
                )
            if identity == own.identity:
                raise ConfigError(f"node {identity} is this node: give another node to forget")
            if not self._is_stale(node):
                raise ConfigError(
                    f"node {identity} ({node.host}:{node.mountpoint}): its record was refreshed "
                    f"{self._began - node.refreshed:.0f} s ago; if it is gone for good, wait, or "
                    "give a smaller --node-age"
                )

    def _named(self, entries: Iterable[Entry]) -> Iterator[tuple[Entry, ObjectName | None]]:
        """Each entry with its name. Names in records are read several at a time."""
        entries = list(entries)
        hashed = [entry for entry in entries if self.keys.record_of(entry.key)]
        if not hashed:
            yield from ((entry, None) for entry in entries)
            return
        self._hashes.update(entry.key.removeprefix(self.keys.long) for entry in hashed)
        with ThreadPoolExecutor(_READERS) as pool:
            found = dict(zip(hashed, pool.map(self._name, hashed), strict=True))
        yield from ((entry, found.get(entry)) for entry in entries)

    def _name(self, entry: Entry) -> ObjectName | None:
        key = self.keys.record_of(entry.key)
        try:
            content = b"".join(self.store.get(key, 0, _NAME_MAX))
            return self.keys.parse_record(key, content)
        except (NoObjectError, MetadataError, WrongBytesError):  # WrongBytesError: an empty record
            return None

    def _enter(self, report: Report, rules: Rules, entry: Entry, verdict: GarbageVerdict) -> None:
        kind, space = verdict
        young = entry.modified > self._cutoff
        if kind not in GARBAGE:
            report.kept.setdefault(kind, Tally()).add(entry.size)
            if kind != "live" and len(report.examples) < EXAMPLES:
                report.examples.append(entry.key)
        elif space is not None:
            found = report.spaces.setdefault(space, NamespaceGarbage(kind, rules.explained(space)))
            found.recent |= young
            found.tally.add(entry.size)
        elif why := self._withheld(rules, entry, kind):
            report.withheld.setdefault(why, Tally()).add(entry.size)
        else:
            report.garbage.setdefault(kind, Tally()).add(entry.size)

    def _withheld(self, rules: Rules, entry: Entry, kind: KeyKind) -> str:
        """The reason why garbage stays for now; "": none."""
        if entry.modified > self._cutoff:
            return "recent"
        return (
            "aside"
            if kind == "aside" and not rules.unused_elsewhere(entry, self.older_than)
            else ""
        )

    def _is_ours(self, key: str) -> bool:
        keys = self.keys
        own = (keys.aside, keys.probes, keys.names, keys.nodes)
        return bool(keys.parse(key) or keys.record_of(key)) or key.startswith(own)

    # Deleting

    def check(self, report: Report, *, all_recorded: bool) -> None:
        """Raise ConfigError if the records cannot tell what is garbage.

        all_recorded: the user has said that no kvfs without a record uses the prefix.
        """
        unread = report.unread.keys() - self.forget
        if unread:
            raise ConfigError(
                f"nothing is deleted: {'; '.join(report.unread[one] for one in sorted(unread))}"
            )
        if not report.nodes and not self._own().identity:
            raise ConfigError(
                "nothing is deleted: no node has a record of the objects in use; mount the prefix "
                "with this kvfs first"
            )
        if report.unexplained and not all_recorded:
            named = ", ".join(map(str, report.unexplained[:EXAMPLES]))
            raise ConfigError(
                f"nothing is deleted: no record of a node explains {named}, so a kvfs without a "
                "record may use the prefix; mount the prefix there with this version of kvfs, or "
                "give --all-recorded if each kvfs has a record"
            )

    def delete(self, report: Report) -> None:
        """Delete the objects that `look` found, if they are still garbage."""
        for space, found in sorted(report.spaces.items()):
            if not found.recent:
                self._delete_below(report, self.keys.folder(*space), report.spaces)
        if self._hashes:
            self._delete_below(report, self.keys.long, report.spaces)
        for kind, prefix in (("aside", self.keys.aside), ("probe", self.keys.probes)):
            if kind in report.garbage:
                self._delete_below(report, prefix, report.spaces)
        # Delete names after their objects, as both are now.
        longs = pages(self.store, self.keys.long)
        self._hashes = {
            entry.key.removeprefix(self.keys.long) for page in longs for entry in page.entries
        }
        self._delete_below(report, self.keys.names, report.spaces)
        if "upload" in report.garbage:
            for upload in list(self.store.uploads(self.keys.prefix)):
                ours = self._is_ours(upload.key) and upload.begun <= self._cutoff
                if ours and upload.upload_id not in self._own().uploads:
                    self.store.abort(upload.key, upload.upload_id)
                    report.deleted.add(0)
        if self.forget and not report.failures and not report.withheld:
            # Delete these records last: only they explain some objects to the next look.
            self.store.delete_many([key_of(self.keys, one) for one in sorted(self.forget)])

    def _delete_below(
        self, report: Report, prefix: str, spaces: dict[Space, NamespaceGarbage]
    ) -> None:
        for page in pages(self.store, prefix):
            if not page.entries:
                break
            named = list(self._named(page.entries))
            rules = self._rules_now()
            doomed = list(self._doomed(rules, named, spaces))
            left = self.store.delete_many([entry.key for entry in doomed])
            for entry in doomed:
                if entry.key not in left:
                    report.deleted.add(entry.size)
            report.failures += len(left)
            room = EXAMPLES - len(report.failed)
            report.failed += [str(error) for error in left.values()][:room]
            self._tell("deleting", report.deleted.objects)

    def _doomed(
        self,
        rules: Rules,
        named: Iterable[tuple[Entry, ObjectName | None]],
        spaces: dict[Space, NamespaceGarbage],
    ) -> Iterator[Entry]:
        """Entries that are still garbage.

        None in a namespace's version that a node writes to again.
        """
        judged = [(entry, *rules.of(entry, name, self._hashes)) for entry, name in named]
        judged = [one for one in judged if one[1] in GARBAGE]
        for entry, _, space in judged:
            if space in spaces and entry.modified > self._cutoff:
                spaces[space].recent = True
        for entry, kind, space in judged:
            here = space is None or (space in spaces and not spaces[space].recent)
            if here and not self._withheld(rules, entry, kind):
                yield entry

    def _rules_now(self) -> Rules:
        """The rules by the records of this moment, right before something is deleted."""
        nodes = self._nodes.look()
        if unread := self._nodes.unread.keys() - self.forget:
            raise MetadataError(self._nodes.unread[min(unread)])
        return Rules(self.keys, nodes, self._own(), self.forget)

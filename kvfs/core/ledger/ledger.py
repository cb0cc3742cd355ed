"""The ledger: it makes its parts, in the order in which they need each other.

Contract: `Ledger` is plain data, without behaviour. A module takes its parts from the ledger when
the module's object is made.
"""

from collections import Counter
from collections.abc import Callable
from typing import get_args

from kvfs.catalog import Catalog
from kvfs.core.ledger.absent_names import AbsentNames
from kvfs.core.ledger.accounts import Accounts
from kvfs.core.ledger.dirty import Dirty
from kvfs.core.ledger.fast_opens import FastOpens
from kvfs.core.ledger.latencies import Latencies
from kvfs.core.ledger.misses import Misses
from kvfs.core.ledger.open_table import OpenTable
from kvfs.core.ledger.orphans import Orphans
from kvfs.core.ledger.prefixes import Prefixes
from kvfs.core.ledger.records import Records
from kvfs.core.ledger.removals import Removals
from kvfs.core.ledger.retries import Retries
from kvfs.core.ledger.tiers import Tiers
from kvfs.core.ledger.trash import Trash
from kvfs.core.ledger.uses import Uses
from kvfs.core.ledger.wakeup import Wakeup
from kvfs.core.namespaces.drops import Reason
from kvfs.core.namespaces.namespaces import Namespaces

COUNTERS = (  # they start at 0; SEMANTICS.md explains each
    "opens_passthrough",
    "opens_served",
    "opens_lent",
    "opens_fast",
    "lookups_fast",
    "misses",
    "opens_unreadable",
    "created",
    "sealed",
    "settled",
    "verified",
    "demoted",
    "promoted",
    "dropped",
    *(f"dropped_{reason}" for reason in get_args(Reason)),
    "missing",
    "quarantined",
    "swept",
    "inodes_unreadable",
    "mover_failures",
    "job_failures",
)


class Ledger:
    """The parts of one mount.

    session: the number of this session. suspect: numbers of sessions whose bytes on NVMe a power
    loss may have taken; kvfs trusts these bytes only after it compared a digest. The ledger calls
    `invalidate_name(parent, name, ino)` for each name that eviction removes.
    """

    def __init__(
        self,
        catalog: Catalog,
        tiers: Tiers,
        *,
        session: int,
        suspect: range = range(0),
        invalidate_name: Callable[[int, bytes, int], None],
    ) -> None:
        self.catalog = catalog
        self.tiers = tiers
        self.session = session
        self.suspect = suspect
        self.invalidate_name = invalidate_name
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        self.wakeup = Wakeup()
        self.retries = Retries()
        self.latencies = Latencies(tiers.media)
        self.namespaces = Namespaces(catalog, tiered=len(tiers.local) > 1)
        self.dirty = Dirty(catalog, self.namespaces, tiers.bucket)
        self.table = OpenTable(catalog, self.namespaces)
        self.uses = Uses(catalog, self.table)
        self.trash = Trash(self.counters, self.wakeup)
        self.accounts = Accounts(catalog, tiers, self.namespaces, self.table, self.wakeup)
        self.orphans = Orphans(tiers, self.table, self.accounts, self.dirty, self.trash)
        self.records = Records(*(tiers, self.table, self.accounts, self.dirty, self.trash), suspect)
        self.verified = self.records.verified
        self.absent_names = AbsentNames(catalog, self.counters)
        self.misses = Misses(catalog, self.namespaces, self.absent_names, self.counters)
        self.fast_opens = FastOpens(
            *(self.table, self.accounts, self.records, self.uses, self.latencies), self.counters
        )
        self.removals = Removals(
            *(tiers, self.table, self.accounts, self.orphans, self.records, self.retries),
            *(self.namespaces, self.dirty, self.trash, self.counters, invalidate_name),
        )
        self.prefixes = Prefixes(
            catalog, self.namespaces, self.table, self.orphans, invalidate_name
        )

"""Hard quotas: kvfs drops objects of a namespace beyond its quota, or refuses new ones.

Contract: these bytes count: of sealed objects, of files that are being written as far as they have
come, and of files without a name (`Unlinked`). For a new block its expected bytes count as well,
and those of the files that are being written. Room is made from the namespace's own objects only, a
few groups at a time. Between two such steps a caller with many groups to drop lets other tasks run,
and then all bytes are counted again. Files without a name that no process has open go first.
Not for soft quotas, which are a namespace's urgency (`Namespace.urgency`); nor for the room of
tiers (`Room`).
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from itertools import chain

import trio

from kvfs.core.capacity.victims import Victims, on_nvme, quota_order, ram_only, ram_spare
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.namespaces.namespace import Namespace
from kvfs.errors import CatalogError, QuotaError
from kvfs.units import format_size, human

log = logging.getLogger(__name__)

AT_ONCE = 16  # groups that a quota drops in a step of the loop, each in some 0.1 ms
FILLED_AT_ONCE = 64  # objects that enter an order in a step of the loop, about 0.5 ms


class Quota:
    """The hard quotas of all namespaces."""

    def __init__(self, ledger: Ledger, victims: Victims) -> None:
        self.ledger = ledger
        self.victims = victims

    def keep(
        self,
        namespace: Namespace,
        wanted: int,
        *,
        objects: int = 0,
        expected: int = 0,
    ) -> bool:
        """Drop groups of a namespace until its hard quotas allow so much more of it.

        wanted, objects: the bytes and objects that are to come now.
        expected: the bytes that the file may come to have. No object goes for those, but there
        must be one that may go.
        Returns whether the quotas allow it by now. Raises QuotaError if no object of the namespace
        may go, or if dropping would be in vain.
        """
        settings = namespace.settings
        if not namespace.has_hard_quota:
            return True
        self.ledger.removals.purge_forgotten()  # or orphans that go anyway would seem to be victims
        if 0 < settings.quota_hard < wanted:
            raise QuotaError(
                f"namespace {self._name(namespace)} cannot take {wanted} bytes: its quota is "
                f"{settings.quota_hard}",
                because="a large file",
            )
        if 0 < settings.quota_objects < objects:
            raise QuotaError(
                f"namespace {self._name(namespace)} cannot take {objects} objects: its quota is "
                f"{settings.quota_objects}"
            )
        coming = count = 0
        for held in self.ledger.table.staging.values():
            if self.ledger.namespaces.of(held.inode) is namespace and held.doom is None:
                self.ledger.table.weigh(held, held.taken)
                count += 1
                if held.expected <= settings.quota_hard:
                    coming += max(0, held.expected - held.staged)
        count += objects
        for _ in range(AT_ONCE):
            if not (
                0 < settings.quota_hard < namespace.counted + wanted
                or 0 < settings.quota_objects < namespace.objects + count
            ):
                break
            if not self._give_one(namespace):
                raise self._used_up(namespace)
        else:
            return False
        later = namespace.counted + coming + max(expected, wanted)
        lacks = later > settings.quota_hard > 0
        if expected and lacks and not self._may_give(namespace):
            raise self._used_up(namespace, expected)
        return True

    def _used_up(self, namespace: Namespace, expected: int = 0) -> QuotaError:
        """expected: bytes that the new file is thought to take, if that is the reason."""
        return QuotaError(
            f"namespace {self._name(namespace)} has {namespace.objects} objects of "
            f"{human(namespace.bytes)}{_writing(namespace)}, {_mapped(namespace)}its quota is "
            f"{_quotas(namespace)}, and nothing more may be dropped{_guessed(expected)}",
            because="an expected size" if expected else "",
        )

    def follow(self, namespace: Namespace) -> bool:
        """Drop groups of a namespace until all its bytes, written ones too, are within its quota.

        Returns whether they are. Raises CatalogError.
        """
        quota = namespace.settings.quota_hard
        while 0 < quota < namespace.counted:
            if not self._give_one(namespace):
                return False
        return True

    def exceeded(self, namespace: Namespace) -> QuotaError:
        """The error for a writer of a namespace when `follow` returns False."""
        return QuotaError(
            f"namespace {self._name(namespace)} has {human(namespace.bytes)} and writes "
            f"{human(namespace.staged)}, {_mapped(namespace)}its quota is "
            f"{format_size(namespace.settings.quota_hard)}, and nothing more may be dropped"
        )

    async def take_in(self, arrivals: Callable[[], list[tuple[Namespace, int, int]]]) -> None:
        """Make room in quotas for arrivals: namespaces, each with further bytes and objects.

        `arrivals` is called again after each turn of the loop. No turn follows its last call.
        Raises QuotaError, and the errors of `arrivals`.
        """
        while not all(self.keep(space, size, objects=n) for space, size, n in arrivals()):
            await trio.lowlevel.checkpoint()

    async def _fill_whole(self, namespace: Namespace) -> None:
        """Fill the order of a new hard quota with the namespace's objects, next victims first."""
        ledger = self.ledger
        orders = (namespace.on_nvme, namespace.ram_clean, namespace.ram_spare, namespace.ram_only)
        for at, ino in enumerate(list(chain.from_iterable(orders))):
            inode = ledger.table.inode(ino)
            if inode is not None and ledger.accounts.accounted(inode):
                ledger.accounts.enter_quota_order(inode)
            if not at % FILLED_AT_ONCE:
                await trio.lowlevel.checkpoint()
        namespace.quota_order_filled = True

    async def bring_within(self, namespace: Namespace) -> None:
        """Drop objects of a namespace beyond its hard quotas, as far as they may go."""
        if not namespace.quota_order_filled:
            await self._fill_whole(namespace)
        with suppress(QuotaError):  # the next create says so
            while not self.keep(namespace, 0):
                await trio.lowlevel.checkpoint()
        if namespace.ino not in self.ledger.namespaces.unaccounted:
            self._end_lowering(namespace)

    def _end_lowering(self, namespace: Namespace) -> None:
        """Log what a lower quota has dropped. A later drop is for the room of a write."""
        drops = namespace.drops
        if drops is None or drops.reason != "quota":  # no quota is lower, or it is dropped by now
            return
        namespace.drops = None
        if drops.objects:
            log.info(
                "namespace %s: its hard quota was set to %s, and kvfs dropped %s for that",
                *(self._name(namespace), _quotas(namespace) or "none", drops),
            )

    def trim(self, namespace: Namespace) -> None:
        """Bring a namespace within its hard quotas after a write, as far as one step can."""
        try:
            self.keep(namespace, 0)
        except QuotaError as error:  # the next create says so
            named = self.ledger.catalog.named(namespace.ino)
            log.debug("%s is beyond its quota after a close: %s", named, error)
        except CatalogError as error:
            named = self.ledger.catalog.named(namespace.ino)
            log.error("%s stays above its quota for now: %s", named, error)

    def _may_give(self, namespace: Namespace) -> bool:
        """Whether `_give_one` would drop an object."""
        nvme, ram = self.ledger.tiers.nvme, self.ledger.tiers.ram
        may = self.victims.has_victim
        if self.ledger.orphans.any_of(namespace) is not None:
            return True
        if namespace.quota_order is not None and namespace.quota_order_filled:
            return may(namespace.quota_order, None, "lose")
        return (
            may(namespace.on_nvme, nvme, "lose")
            or may(namespace.ram_spare, ram, "lose")
            or may(namespace.ram_only, ram, "lose")
        )

    def _give_one(self, namespace: Namespace) -> bool:
        """Drop a whole object of a namespace; of the lowest tier if there is no better order."""
        nvme, ram = self.ledger.tiers.nvme, self.ledger.tiers.ram
        reason = "evicted" if namespace.drops is None else namespace.drops.reason
        orphan = self.ledger.orphans.any_of(namespace)
        if orphan is not None and self.ledger.removals.purge(orphan):
            return True
        if namespace.quota_order is not None and namespace.quota_order_filled:
            return self.victims.evict_of(namespace, quota_order, None, "lose", reason)
        return (
            self.victims.evict_of(namespace, on_nvme, nvme, "lose", reason)
            or self.victims.evict_of(namespace, ram_spare, ram, "lose", reason)
            or self.victims.evict_of(namespace, ram_only, ram, "lose", reason)
        )

    def _name(self, namespace: Namespace) -> str:
        return self.ledger.namespaces.name(namespace.ino)


def _quotas(namespace: Namespace) -> str:
    settings = namespace.settings
    quotas = [format_size(settings.quota_hard)] if settings.quota_hard else []
    quotas += [f"{settings.quota_objects} objects"] if settings.quota_objects else []
    return " and ".join(quotas)


def _writing(namespace: Namespace) -> str:
    return f" and writes {human(namespace.staged)}" if namespace.staged else ""


def _guessed(expected: int) -> str:
    if not expected:
        return ""
    return f"; a new file is expected to take {human(expected)}, as earlier ones of its kind"


def _mapped(namespace: Namespace) -> str:
    if not namespace.unlinked:
        return ""
    return f"processes have {human(namespace.unlinked)} of files mapped that are gone, "

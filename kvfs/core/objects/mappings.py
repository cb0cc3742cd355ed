"""Mappings that outlive their descriptor.

Contract: under passthrough a mapping keeps the backing file, not the handle, and the kernel does
not tell of its end. `shared` says at a writer's release whether a process may have the file mapped.
If so, the caller calls `keep`: the object still counts the writer. `watch` removes that writer when
the mapping is gone.

Invariant: an object that is `mapped` counts one writer more than it has handles. The catalog calls
it unfinished, unless the catalog fails to record this, so that a next daemon watches it as well.
Not for mappings of readers: their objects are sealed.
"""

import logging
from collections.abc import Awaitable, Callable

import trio

from kvfs.core.ledger.open_table import OpenObject, OpenTable
from kvfs.core.objects.files import Backings
from kvfs.errors import CatalogError

log = logging.getLogger(__name__)

PERIOD, PERIOD_MAX = 0.002, 0.5  # s between two looks at objects that are mapped
LOOKS = 5  # looks until an object that was just released is taken for mapped


class Mappings:
    """Watches the mapped objects of a mount. `close(held)` releases a mapping's writer."""

    def __init__(
        self,
        table: OpenTable,
        backings: Backings,
        close: Callable[[OpenObject], Awaitable[None]],
    ) -> None:
        self.table = table
        self.backings = backings
        self._close = close
        self._any = trio.Event()  # set while there may be an object that is mapped only

    def keep(self, held: OpenObject) -> None:
        """Count a mapping as a writer until `watch` finds it gone."""
        held.mapped = True
        self._any.set()
        try:
            with self.table.catalog.batch() as batch:
                batch.mark_unfinished(held.inode.ino)  # for a next daemon, which sees no handle
        except CatalogError as error:
            what = self.table.catalog.named(held.inode.ino)
            log.error("after a takeover kvfs will not know that %s is mapped: %s", what, error)

    def shared(self, held: OpenObject) -> bool:
        """Whether another process than the daemon and one writer has the file.

        False if the object has readers: then it cannot be told. Without them no other open is under
        way, so the kernel lease that `Tier.is_in_use` takes disturbs none.
        """
        if not self._alone(held):
            return False
        if held.reopened and held.backing_id:  # the kernel has both, and would count one as shared
            self.backings.release(held.backing_id)
            held.backing_id = self.backings.register(held.fd)
            held.reopened = False
        return held.tier.is_in_use(held.fd)

    async def outlives(self, held: OpenObject) -> bool:
        """Whether a mapping is left of a writer whose handle is being released.

        The kernel lets go of the file a moment after it sends the release. So this looks again at
        a file that seems to be mapped. In 8000 creates, 21 files seemed mapped at first. Kept as
        mapped, they would stay staging for as long as other processes read them.
        """
        for _ in range(LOOKS):
            if not self.shared(held):
                return False
            await trio.sleep(PERIOD)
        return self.shared(held)

    def may_be_written(self, held: OpenObject) -> bool:
        """Whether a process may still have a descriptor lent for writing, or a mapping of it.

        A process has let go of a descriptor when its close(2) returns. True if the object has
        readers: then it cannot be told.
        """
        return not self._alone(held) or self.shared(held)

    @staticmethod
    def _alone(held: OpenObject) -> bool:
        return held.writers == 1 and not held.readers

    async def watch(self) -> None:
        """End the writing of mapped objects when their mappings are gone; run until the unmount.

        An object that other processes have open is looked at after they have closed it.
        """
        period = PERIOD
        while True:
            if not any(held.mapped for held in self.table.staging.values()):
                self._any, period = trio.Event(), PERIOD
                await self._any.wait()
            await trio.sleep(period)
            period = min(2 * period, PERIOD_MAX)
            await self.look()

    async def look(self) -> None:
        """Look once at all mapped objects."""
        await self.end(lambda held: self._alone(held) and not self.shared(held))

    async def end(self, gone: Callable[[OpenObject], bool]) -> None:
        """End the writing of the mapped objects for which `gone` is true."""
        for held in [held for held in self.table.staging.values() if held.mapped]:
            if gone(held):
                held.mapped = False
                held.sealed_as = (-1, -1, -1)  # the catalog has it as unfinished
                await self._close(held)

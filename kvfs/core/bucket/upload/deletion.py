"""Deletes superseded keys from the bucket, many with one request.

Contract: after the bucket has deleted keys, one batch of the catalog forgets them. If the store
refuses a key, it stays in `Superseded.deletes`, and kvfs tries again. During the request its keys
are `locked`, so that no upload goes to one of them. A key waits if another request has locked it,
or if a program reads its object during a download. A key may be known from an upload attempt of
unknown outcome only. Then kvfs deletes the object only if that attempt has made it. Not for the
choice of keys: `core/ledger/superseded.py`.
"""

import logging
from collections.abc import Container

import trio

from kvfs import failpoints
from kvfs.core.bucket.upload.backoff import Backoff
from kvfs.core.ledger.dirty import Dirty
from kvfs.errors import CatalogError, TierError
from kvfs.movement import uploading
from kvfs.movement.remote import Remote
from kvfs.s3.errors import StoreError
from kvfs.s3.store import LIST_LIMIT

log = logging.getLogger(__name__)

LOOK = 1.0  # s between two checks of a state that signals no change
BUSY_DELAY = 0.05  # s until the next try of keys that another request has locked
GATHERED = 0.1  # s of waiting, so that one request deletes many keys


class Deletion:
    """Deletes keys. `locked` are the keys with a request under way, shared with the uploads."""

    def __init__(
        self,
        dirty: Dirty,
        remote: Remote,
        backoff: Backoff,
        locked: set[str],
        reading: Container[str],
    ) -> None:
        """reading: keys of objects that programs still read, perhaps after their unlink."""
        self.dirty = dirty
        self.superseded = dirty.superseded
        self.remote = remote
        self.bucket = remote.bucket
        self.backoff = backoff
        self._reading = reading
        self._locked = locked

    async def run(self) -> None:
        """Delete keys, for ever. The caller has loaded all keys to delete."""
        while True:
            changed = self.dirty.changed
            if not self.superseded.deletes or not self.backoff.ready:
                with trio.move_on_after(LOOK):
                    await changed.wait()
                continue
            await trio.sleep(GATHERED)
            await self.delete_some()

    async def delete_some(self) -> None:
        """Delete some keys with one request, as many as fit."""
        kept = (self._locked, self._reading)
        keys = [key for key in self.superseded.deletes if not any(key in some for some in kept)]
        keys = keys[: LIST_LIMIT // 2]
        if not keys:
            await trio.sleep(BUSY_DELAY)
            return
        records = [record for key in keys if (record := self.bucket.keys.record_of(key))]
        self._locked.update(keys)
        try:
            attempts = {key: tokens for key in keys if (tokens := self.superseded.attempts(key))}
            doomed = [*keys, *records]
            left = await self.remote.call("ask", 0, (), uploading.remove, doomed, attempts)
            failpoints.reach("dispatcher.deleted")
            with self.dirty.catalog.batch() as batch:
                for key in set(keys) - left.keys():
                    self.superseded.unmark(key, batch)
            self.bucket.counters["deletes"] += len(set(keys) - left.keys())
            if left:
                self.backoff.failed("delete", next(iter(left.values())))
        except (StoreError, TierError) as error:
            self.backoff.failed("delete", error)
        except CatalogError as error:
            log.error("%d keys are deleted once more: %s", len(keys), error)
            await trio.sleep(LOOK)
        finally:
            self._locked.difference_update(keys)

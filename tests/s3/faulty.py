"""A store before another one, which injects the failures of real stores."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from kvfs.s3.errors import StoreError
from kvfs.s3.store import LIST_LIMIT, Data, Entry, Head, ListingPage, Part, Store, Upload

T = TypeVar("T")

Verb = Literal[
    "put", "copy", "get", "peek", "head", "delete", "delete_many", "list",
    "begin", "put_part", "copy_part", "complete", "abort", "uploads", "clock", "any",
]  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A failure of the `nth` call of a verb, from 1; with 0 of each call.

    - error: raised instead of the call. With `late` it is raised after the call was carried out, as
      if its answer were lost.
    - keep: this many bytes of a `get` arrive before the error, or before they just end.
    - flip: the first byte that arrives is another one.
    - instead: the answer is that of this key, for any ETag. In a listing each entry has the size
      and ETag of that object.
    - beside: only the metadata is that of another key.
    """

    verb: Verb
    nth: int = 0
    error: StoreError | None = None
    late: bool = False
    keep: int | None = None
    flip: bool = False
    instead: str = ""
    beside: str = ""


class FaultyStore:
    """`calls` counts verbs; `log` has them in their order. `skew`: s that its clock is ahead."""

    def __init__(
        self,
        store: Store,
        *faults: Fault,
        skew: float = 0.0,
        pause: Callable[[str], object] = lambda _: None,
    ) -> None:
        """`pause` is called with the verb before each call; it may wait there, for a slow store."""
        self.name = store.name
        self.faults = list(faults)
        self.calls: Counter[str] = Counter()
        self.log: list[str] = []
        self._store = store
        self._skew = skew
        self._pause = pause

    def _call(self, verb: Verb, do: Callable[[], T]) -> T:
        self._pause(verb)
        return self._do(self._count(verb), do)

    @staticmethod
    def _do(fault: Fault | None, do: Callable[[], T]) -> T:
        if fault is None or fault.error is None or fault.keep is not None:
            return do()
        if fault.late:
            do()
        raise fault.error

    def _count(self, verb: Verb) -> Fault | None:
        self.log.append(verb)
        for name in (verb, "any"):
            self.calls[name] += 1
        for fault in self.faults:
            if fault.verb in {verb, "any"} and fault.nth in {0, self.calls[fault.verb]}:
                return fault
        return None

    def clock(self) -> float:
        return self._call("clock", self._store.clock) + self._skew

    def put(self, key: str, data: Data, metadata: Mapping[str, str], *, once: bool) -> str:
        return self._call("put", lambda: self._store.put(key, data, metadata, once=once))

    def copy(self, source: str, key: str, metadata: Mapping[str, str], *, etag: str) -> str:
        copied = partial(self._store.copy, source, key, metadata, etag=etag)
        return self._call("copy", copied)

    def get(self, key: str, start: int, length: int, *, etag: str = "") -> Iterator[bytes]:
        self._pause("get")
        fault = self._count("get") or Fault("get")
        if fault.error is not None and fault.keep is None:
            raise fault.error
        left = length if fault.keep is None else fault.keep
        flip = fault.flip
        key, etag = (fault.instead, "") if fault.instead else (key, etag)
        for data in self._store.get(key, start, length, etag=etag):
            piece = data[:left]
            left -= len(piece)
            if piece:
                yield bytes([piece[0] ^ 1]) + piece[1:] if flip else piece
            flip = False
        if fault.error is not None:
            raise fault.error

    def peek(self, key: str, length: int, *, etag: str) -> tuple[Head, bytes]:
        self._pause("peek")
        fault = self._count("peek") or Fault("peek")
        if fault.error is not None:
            raise fault.error
        if fault.instead:
            key, etag = fault.instead, self._store.head(fault.instead).etag
        head, data = self._store.peek(key, length, etag=etag)
        found = data[: fault.keep]
        head = self._told(fault, head)
        return head, bytes([found[0] ^ 1]) + found[1:] if fault.flip else found

    def head(self, key: str) -> Head:
        self._pause("head")
        fault = self._count("head") or Fault("head")
        found = self._do(fault, lambda: self._store.head(fault.instead or key))
        return self._told(fault, found._replace(modified=found.modified + self._skew))

    def _told(self, fault: Fault, head: Head) -> Head:
        """The head, with the metadata of the fault."""
        if not fault.beside:
            return head
        return head._replace(metadata=self._store.head(fault.beside).metadata)

    def delete(self, key: str) -> None:
        self._call("delete", lambda: self._store.delete(key))

    def delete_many(self, keys: Sequence[str]) -> dict[str, StoreError]:
        return self._call("delete_many", lambda: self._store.delete_many(keys))

    def list(
        self, prefix: str, *, after: str = "", delimiter: str = "", limit: int = LIST_LIMIT
    ) -> ListingPage:
        listed = partial(self._store.list, prefix, after=after, delimiter=delimiter, limit=limit)
        self._pause("list")
        fault = self._count("list") or Fault("list")
        page = self._do(fault, listed)
        entries = [self._skewed(entry) for entry in page.entries]
        if fault.instead:
            other = self._store.head(fault.instead)
            entries = [entry._replace(size=other.size, etag=other.etag) for entry in entries]
        return page._replace(entries=entries)

    def _skewed(self, entry: Entry) -> Entry:
        return entry._replace(modified=entry.modified + self._skew)

    def begin(self, key: str, metadata: Mapping[str, str]) -> str:
        return self._call("begin", lambda: self._store.begin(key, metadata))

    def put_part(self, key: str, upload_id: str, number: int, data: Data) -> str:
        return self._call("put_part", lambda: self._store.put_part(key, upload_id, number, data))

    def copy_part(
        self,
        source: str,
        key: str,
        upload_id: str,
        number: int,
        start: int,
        length: int,
        *,
        etag: str,
    ) -> str:
        wanted = (source, key, upload_id, number, start, length)
        return self._call("copy_part", lambda: self._store.copy_part(*wanted, etag=etag))

    def complete(self, key: str, upload_id: str, parts: Sequence[Part], *, once: bool) -> None:
        self._call("complete", lambda: self._store.complete(key, upload_id, parts, once=once))

    def abort(self, key: str, upload_id: str) -> None:
        self._call("abort", lambda: self._store.abort(key, upload_id))

    def uploads(self, prefix: str) -> Iterator[Upload]:
        found = self._call("uploads", lambda: list(self._store.uploads(prefix)))
        return (one._replace(begun=one.begun + self._skew) for one in found)


def slow(store: Store) -> FaultyStore:
    """A store on which each call first waits 2 ms, so that work beside the call overtakes it."""
    return FaultyStore(store, pause=lambda _: time.sleep(0.002))

"""A store in memory: as strict as S3, and as lax as some stores if a test asks for it."""

import hashlib
import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvfs.s3.errors import (
    NoObjectError,
    NoUploadError,
    ObjectChangedError,
    ObjectExistsError,
    RefusedError,
    StoreError,
    WrongBytesError,
)
from kvfs.s3.store import LIST_LIMIT, PART_MIN, Data, Entry, Head, ListingPage, Part, Upload

PIECE = 1 << 20


@dataclass
class _Object:
    data: bytes
    metadata: dict[str, str]
    etag: str
    modified: float = field(default_factory=time.time)


@dataclass
class _Unfinished:
    key: str
    metadata: dict[str, str]
    begun: float = field(default_factory=time.time)
    parts: dict[int, bytes] = field(default_factory=dict)


class MemoryStore:
    """`once_put`, `once_complete`: whether it honours If-None-Match there."""

    name = "memory"

    def __init__(self, *, once_put: bool = True, once_complete: bool = True) -> None:
        self.once_put = once_put
        self.once_complete = once_complete
        self.objects: dict[str, _Object] = {}
        self.unfinished: dict[str, _Unfinished] = {}
        self._ids = (f"upload-{number}" for number in itertools.count())
        self._lock = threading.Lock()

    def clock(self) -> float:
        return time.time()

    def put(self, key: str, data: Data, metadata: Mapping[str, str], *, once: bool) -> str:
        return self._store(key, data, metadata, _md5(data), once=once and self.once_put)

    def _store(
        self, key: str, data: Data, metadata: Mapping[str, str], etag: str, *, once: bool
    ) -> str:
        with self._lock:
            if once and key in self.objects:
                raise ObjectExistsError(key)
            self.objects[key] = _Object(bytes(data), dict(metadata), etag)
        return etag

    def _find(self, key: str) -> _Object:
        if key not in self.objects:
            raise NoObjectError(key)
        return self.objects[key]

    def copy(self, source: str, key: str, metadata: Mapping[str, str], *, etag: str) -> str:
        found = self._find(source)
        if found.etag != etag:
            raise ObjectChangedError(source)
        return self._store(key, found.data, metadata, found.etag, once=False)

    def get(self, key: str, start: int, length: int, *, etag: str = "") -> Iterator[bytes]:
        if not length:
            return
        found = self._find(key)
        if etag not in {"", found.etag}:
            raise ObjectChangedError(key)
        if start >= len(found.data):
            raise WrongBytesError(key)
        data = found.data[start : start + length]
        for begin in range(0, len(data), PIECE):
            yield data[begin : begin + PIECE]

    def peek(self, key: str, length: int, *, etag: str) -> tuple[Head, bytes]:
        data = b"".join(self.get(key, 0, length, etag=etag))
        return self.head(key), data

    def head(self, key: str) -> Head:
        found = self._find(key)
        return Head(len(found.data), found.etag, found.modified, dict(found.metadata))

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def delete_many(self, keys: Sequence[str]) -> dict[str, StoreError]:
        for key in keys:
            self.delete(key)
        return {}

    def list(
        self, prefix: str, *, after: str = "", delimiter: str = "", limit: int = LIST_LIMIT
    ) -> ListingPage:
        entries: list[Entry] = []
        folders: list[str] = []
        last = ""
        for key in sorted(self.objects, key=str.encode):
            if not key.startswith(prefix) or key.encode() <= after.encode():
                continue
            folder, found, _ = key.removeprefix(prefix).partition(delimiter or "\0")
            if found and folders[-1:] == [prefix + folder + delimiter]:
                continue
            if len(entries) + len(folders) == limit:
                return ListingPage(entries, folders, last)
            if found:
                folders.append(prefix + folder + delimiter)
                last = folders[-1] + "\U0010ffff"
            else:
                one = self.objects[key]
                entries.append(Entry(key, len(one.data), one.etag, one.modified))
                last = key
        return ListingPage(entries, folders, "")

    def begin(self, key: str, metadata: Mapping[str, str]) -> str:
        upload_id = next(self._ids)
        self.unfinished[upload_id] = _Unfinished(key, dict(metadata))
        return upload_id

    def _upload(self, key: str, upload_id: str) -> _Unfinished:
        found = self.unfinished.get(upload_id)
        if found is None or found.key != key:
            raise NoUploadError(f"{key} {upload_id}")
        return found

    def put_part(self, key: str, upload_id: str, number: int, data: Data) -> str:
        self._upload(key, upload_id).parts[number] = bytes(data)
        return _md5(data)

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
        upload, found = self._upload(key, upload_id), self._find(source)
        if found.etag != etag:
            raise ObjectChangedError(source)
        data = found.data[start : start + length]
        if len(data) != length:
            raise RefusedError(f"{source}: has no bytes {start} to {start + length}")
        upload.parts[number] = data
        return _md5(data)

    def complete(self, key: str, upload_id: str, parts: Sequence[Part], *, once: bool) -> None:
        upload = self._upload(key, upload_id)
        if any(_md5(upload.parts.get(part.number, b"")) != part.etag for part in parts):
            raise WrongBytesError(f"{key}: a part is another one")
        pieces = [upload.parts[part.number] for part in parts]
        if any(len(piece) < PART_MIN for piece in pieces[:-1]):
            raise WrongBytesError(f"{key}: a part is too small")
        data = b"".join(pieces)
        etag = f"{_md5(data)}-{len(parts)}"
        self._store(key, data, upload.metadata, etag, once=once and self.once_complete)
        del self.unfinished[upload_id]

    def abort(self, key: str, upload_id: str) -> None:
        if upload_id in self.unfinished:
            self._upload(key, upload_id)
            del self.unfinished[upload_id]

    def uploads(self, prefix: str) -> Iterator[Upload]:
        for upload_id, upload in self.unfinished.items():
            if upload.key.startswith(prefix):
                yield Upload(upload.key, upload_id, upload.begun)


def _md5(data: Data) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()

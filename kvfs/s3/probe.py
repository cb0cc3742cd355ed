"""Check once, at mount, that the bucket can be used, and what its store honours.

Contract: writes, reads and deletes objects of its own below PREFIX.kvfs/probe/. It leaves none
behind unless the store fails meanwhile. An error that a human must cure is a ConfigError with its
cure. An error that may pass stays a ThrottledError, OutageError or StoreFullError.
"""

import uuid
from collections.abc import Callable
from dataclasses import replace

from kvfs.errors import ConfigError
from kvfs.s3.errors import (
    NoBucketError,
    ObjectExistsError,
    OutageError,
    RefusedError,
    StoreError,
    StoreFullError,
    ThrottledError,
)
from kvfs.s3.keys import Keys
from kvfs.s3.store import Part, Store
from kvfs.s3.transfer import Terms

_MAY_PASS = (ThrottledError, OutageError, StoreFullError)
_BYTES = b"kvfs asks what this store honours; this object may be deleted"


def probe(
    store: Store, keys: Keys, terms: Terms, *, look: Callable[[], object] = lambda: None
) -> Terms:
    """Return the terms, with what the store honours. Raises ConfigError, or errors that may pass.

    look: called before anything is written, to raise ConfigError if kvfs may not write.
    """
    key = f"{keys.probes}{uuid.uuid4().hex}"
    try:
        store.list(keys.prefix, limit=1)
        look()
        try:
            once_put = _once_put(store, key)
            _read_back(store, key)
            once_complete = _once_complete(store, key)
        finally:
            store.delete(key)
    except _MAY_PASS:
        raise
    except NoBucketError as error:
        raise ConfigError(f"{error}: create the bucket, or name another one") from error
    except RefusedError as error:
        raise ConfigError(
            f"{error}: kvfs needs to list, read, write and delete below "
            f"s3://{store.name}/{keys.prefix}"
        ) from error
    except StoreError as error:
        raise ConfigError(f"{error}: kvfs cannot use this store") from error
    return replace(terms, once_put=once_put, once_complete=once_complete)


def _once_put(store: Store, key: str) -> bool:
    try:
        store.put(key, _BYTES, {}, once=True)
    except RefusedError:  # for the condition, unless the store refuses both requests
        store.put(key, _BYTES, {}, once=False)
        return False
    try:
        store.put(key, _BYTES, {}, once=True)
    except ObjectExistsError:
        return True
    return False


def _read_back(store: Store, key: str) -> None:
    """Read as downloads do: a range, if the object still has its ETag."""
    head = store.head(key)
    found = b"".join(store.get(key, 1, len(_BYTES) - 1, etag=head.etag))
    if found != _BYTES[1:]:
        raise StoreError(f"{store.name}/{key}: the bytes read differ from those written")


def _once_complete(store: Store, key: str) -> bool:
    upload_id = store.begin(key, {})
    try:
        etag = store.put_part(key, upload_id, 1, _BYTES)
        try:
            store.complete(key, upload_id, [Part(1, etag)], once=True)
        except (ObjectExistsError, RefusedError) as error:
            return isinstance(error, ObjectExistsError)
        return False
    finally:
        store.abort(key, upload_id)

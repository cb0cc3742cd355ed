"""The failures of an object store.

Contract: a `Store` raises only these errors. Each asks for another reaction: wait and try again
(Throttled, Outage), tell a human (Refused, NoBucket, Full), treat the object as a miss (NoObject,
ObjectChanged, WrongBytes, Metadata), accept it (ObjectExists). Messages name the bucket and the
key, never a credential. An error has only its message, so that a worker process can send it. Not
for failures of the local file: those are OSError.
"""

from kvfs.errors import TierError


class StoreError(TierError):
    """The base class of a store's errors."""


class NoObjectError(StoreError):
    """There is no such object."""


class NoBucketError(StoreError):
    """There is no such bucket."""


class NoUploadError(StoreError):
    """The multipart upload does not exist: completed, aborted or deleted by the store."""


class ObjectExistsError(StoreError):
    """The key may be written only once, and another object has it."""


class ObjectChangedError(StoreError):
    """The object is no longer the one whose ETag was read."""


class ThrottledError(StoreError):
    """The store asks for fewer requests, and its own retries were not enough."""


class OutageError(StoreError):
    """The store cannot be reached, does not answer in time, or fails inside."""


class RefusedError(StoreError):
    """Credentials, permissions or the request itself are wrong: another try will not help."""


class StoreFullError(StoreError):
    """The store or a quota of it is full."""


class WrongBytesError(StoreError):
    """The bytes differ from those that were stored, or their number does."""


class MetadataError(StoreError):
    """The metadata beside an object are not of kvfs's form."""


class SourceError(StoreError):
    """The local file is not, or no longer, the one to be stored."""

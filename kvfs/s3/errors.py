"""What an object store can answer other than what was asked for.

Contract: whatever a `Store` raises is one of these, and each asks for another reaction: wait and
try again (Throttled, Outage), tell a human (Refused, NoBucket, Full), take the object for a miss
(NoObject, ObjectChanged, WrongBytes, Metadata), be content (ObjectExists). Messages name the
bucket and the key, never a credential. They are made of their message alone, so that a worker
process can send them. Not for failures of the local file: those are OSError.
"""

from kvfs.errors import TierError


class StoreError(TierError):
    """The root of what a store answers."""


class NoObjectError(StoreError):
    """There is no such object."""


class NoBucketError(StoreError):
    """There is no such bucket."""


class NoUploadError(StoreError):
    """There is no such multipart upload: completed, aborted or swept by the store."""


class ObjectExistsError(StoreError):
    """A name is published once, and another object has it."""


class ObjectChangedError(StoreError):
    """The object is another one than it was when its ETag was read."""


class ThrottledError(StoreError):
    """The store asks for fewer requests; its own retries were not enough."""


class OutageError(StoreError):
    """The store cannot be reached, does not answer in time, or fails inside."""


class RefusedError(StoreError):
    """Credentials, permissions or the request itself: trying again will not help."""


class StoreFullError(StoreError):
    """The store or a quota of it is full."""


class WrongBytesError(StoreError):
    """Other bytes, or another number of them, than were stored."""


class MetadataError(StoreError):
    """What is written beside an object is not what kvfs writes there."""


class SourceError(StoreError):
    """The local file is not, or no longer, the one that was to be stored."""

"""Clients that move whole objects between files and a bucket: kvfs, and boto3 in its two ways.

Several threads may call a client at once. Not for timing.
"""

import os
import queue
from typing import Any, Protocol

import boto3  # type: ignore[import-untyped]
import botocore.session  # type: ignore[import-untyped]
import xxhash
from boto3.s3.transfer import (  # type: ignore[import-untyped]
    TransferConfig,
    create_transfer_manager,
)
from botocore.config import Config  # type: ignore[import-untyped]

from kvfs.s3.boto import BotoStore
from kvfs.s3.place import BucketPlace
from kvfs.s3.transfer import StoreTransfers, Terms

CONNECTIONS = 64
CONFIG = Config(
    max_pool_connections=CONNECTIONS,
    request_checksum_calculation="when_required",  # the server knows no others; it saves time
    response_checksum_validation="when_required",
    s3={"addressing_style": "path"},
)


class Client(Protocol):
    """One way to move objects."""

    name: str
    checked: bool  # whether the server can tell that an upload was damaged on its way

    def upload(self, path: str, key: str) -> None:
        """Store a file as a new object."""

    def download(self, key: str, path: str) -> None:
        """Write an object to a file."""


class Kvfs:
    """As movers do: names published once, digests compared in both directions."""

    name = "kvfs"
    checked = True

    def __init__(self, place: BucketPlace, terms: Terms, clients: int) -> None:
        self._store = BotoStore(place, connections=CONNECTIONS)
        self._free: queue.SimpleQueue[StoreTransfers] = queue.SimpleQueue()
        for _ in range(clients):
            self._free.put(StoreTransfers(self._store, terms))
        # The catalog's facts of an object: its digest, and its ETag if it is in the bucket.
        self._digests: dict[str, bytes] = {}
        self._objects: dict[str, tuple[int, str, bytes]] = {}

    def learn(self, path: str, key: str) -> None:
        """The digest of a file; and of an object, if it is there, that has its bytes."""
        with open(path, "rb") as file:
            data = file.read()
        self._digests[path] = xxhash.xxh3_128_digest(data)
        if key:
            self._objects[key] = (len(data), self._store.head(key).etag, self._digests[path])

    def upload(self, path: str, key: str) -> None:
        transfers = self._free.get()
        fd = os.open(path, os.O_RDONLY)
        try:
            transfers.upload(
                key,
                fd,
                os.fstat(fd).st_size,
                {},
                digest=self._digests[path],
                once=True,
                begun=lambda _: None,
            )
        finally:
            os.close(fd)
            self._free.put(transfers)

    def download(self, key: str, path: str) -> None:
        size, etag, digest = self._objects[key]
        transfers = self._free.get()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.truncate(fd, size)
            transfers.download(key, fd, size, etag=etag, digest=digest)
        finally:
            os.close(fd)
            self._free.put(transfers)


class Boto3:
    """boto3's transfer manager as `upload_file` and `download_file` use it."""

    def __init__(self, place: BucketPlace, name: str, manager: Any, *, checked: bool) -> None:  # noqa: ANN401
        self.name = name
        self.checked = checked
        self._bucket = place.bucket
        self._manager = manager

    def upload(self, path: str, key: str) -> None:
        self._manager.upload(path, self._bucket, key).result()

    def download(self, key: str, path: str) -> None:
        self._manager.download(self._bucket, key, path).result()


class _Unchecked:
    """A client of the CRT that asks for no checksums."""

    def __init__(self, client: Any) -> None:  # noqa: ANN401 (untyped)
        self._client = client

    def make_request(self, **request: Any) -> Any:  # noqa: ANN401 (untyped)
        return self._client.make_request(**{**request, "checksum_config": None})

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (untyped)
        return getattr(self._client, name)


def classic(place: BucketPlace) -> Boto3:
    """In Python."""
    client = boto3.client("s3", endpoint_url=place.endpoint, config=CONFIG)
    config = TransferConfig(preferred_transfer_client="classic")
    return Boto3(place, "boto3", create_transfer_manager(client, config), checked=True)


def crt(place: BucketPlace) -> Boto3 | None:
    """With the CRT extra, None if it is not installed.

    boto3 itself gives the CRT neither an endpoint nor plain HTTP, so it is made as boto3 makes it,
    with those. Its trailing checksums are refused by this server, so they are left out, and
    nothing then protects what is uploaded.
    """
    try:
        from s3transfer import crt as of_crt  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError:
        return None
    session = botocore.session.get_session()
    credentials = of_crt.BotocoreCRTCredentialsWrapper(session.get_credentials())
    client = of_crt.create_s3_crt_client(
        place.region, credentials.to_crt_credentials_provider(), use_ssl=False
    )
    serializer = of_crt.BotocoreCRTRequestSerializer(
        session,
        {"region_name": place.region, "endpoint_url": place.endpoint, "config": CONFIG},
    )
    manager = of_crt.CRTTransferManager(_Unchecked(client), serializer)
    return Boto3(place, "boto3 CRT", manager, checked=False)

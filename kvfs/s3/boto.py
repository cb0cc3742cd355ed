"""The store on boto3: Amazon S3, Ceph and other stores with the S3 protocol.

Contract: as `kvfs.s3.store` says. Every body is signed with its SHA-256, and every store checks
this, so the store refuses an upload that was damaged on its way. Downloads are checked against the
requested length and the ETag. The client of botocore retries (standard mode: back-off with jitter)
and bounds each wait. `failures` translates the remaining errors. Only boto3 finds the credentials;
no message contains them. Importing this module loads boto3, so it is for movers only.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NamedTuple

import boto3  # type: ignore[import-untyped]
import botocore.loaders  # type: ignore[import-untyped]
import botocore.session  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]
from botocore.response import StreamingBody  # type: ignore[import-untyped]

from kvfs.s3.direct import LENGTH, Direct
from kvfs.s3.errors import (
    NoObjectError,
    NoUploadError,
    ObjectChangedError,
    ObjectExistsError,
    StoreError,
    WrongBytesError,
)
from kvfs.s3.failures import failure_of, translated
from kvfs.s3.place import BucketPlace
from kvfs.s3.store import LIST_LIMIT, Data, Entry, Head, ListingPage, Part, Upload

PIECE = 1 << 20  # bytes read from a connection at once
META = "x-amz-meta-"  # begins the names of headers that are metadata
ATTEMPTS = 4  # of one request, with 1, 2 and 4 s between them at most
CONNECT_TIMEOUT = 5.0  # s
READ_TIMEOUT = 20.0  # s without a byte
# At lower levels botocore logs whole requests, with session tokens.
logging.getLogger("botocore").setLevel(logging.WARNING)

_LOADER = (
    botocore.loaders.Loader()
)  # caches the description of the services: 0.1 s of a client's 0.15
_LAST = "\U0010ffff"  # sorts after everything that can follow it


class BotoStore:
    """`connections` is how many requests can run at once."""

    def __init__(
        self,
        place: BucketPlace,
        *,
        connections: int = 16,
        attempts: int = ATTEMPTS,
        connect_timeout: float = CONNECT_TIMEOUT,
        read_timeout: float = READ_TIMEOUT,
    ) -> None:
        """Raises RefusedError if the profile does not exist or no region is known."""
        self.name = place.bucket
        self._bucket = place.bucket
        config = Config(
            retries={"mode": "standard", "total_max_attempts": attempts},
            connect_timeout=connect_timeout,
            read_timeout=read_timeout,
            max_pool_connections=connections,
            tcp_keepalive=True,
            # Some stores do not know the newer checksums, and the signature covers each body.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # Bucket names in host names need DNS entries, which private endpoints rarely have.
            s3={
                "payload_signing_enabled": True,
                "addressing_style": "path" if place.endpoint else "auto",
            },
        )
        with translated(str(place)):
            core = _core(place.profile)
            session = boto3.session.Session(botocore_session=core, region_name=place.region)
            self._client = session.client("s3", endpoint_url=place.endpoint, config=config)
        self._direct = Direct(
            *(core, self._client, place.bucket),
            connections=connections,
            timeout=(connect_timeout, read_timeout),
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._direct.close()

    def clock(self) -> float:
        """The store's time, by a listing: every user of the bucket may list it."""
        with self._of(""):
            answer = self._client.list_objects_v2(Bucket=self._bucket, MaxKeys=1)
            told = answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        try:
            return parsedate_to_datetime(told).timestamp()
        except (TypeError, ValueError, OverflowError) as error:
            raise StoreError(
                f"{self.name}: expected a Date header with the time, got {told!r}"
            ) from error

    def put(self, key: str, data: Data, metadata: Mapping[str, str], *, once: bool) -> str:
        with self._of(key, precondition=ObjectExistsError):
            answer = self._client.put_object(
                **self._at(key), Body=_Body(data), Metadata=dict(metadata), **_once(once=once)
            )
            return _etag(answer)

    def copy(self, source: str, key: str, metadata: Mapping[str, str], *, etag: str) -> str:
        with self._of(source, precondition=ObjectChangedError):
            answer = self._client.copy_object(
                **self._at(key),
                CopySource=self._at(source),
                CopySourceIfMatch=etag,
                Metadata=dict(metadata),
                MetadataDirective="REPLACE",
            )
            return _etag(answer["CopyObjectResult"])

    def get(self, key: str, start: int, length: int, *, etag: str = "") -> Iterator[bytes]:
        if not length:
            return
        with self._range(key, start, length, etag) as answer:
            while data := answer.body.read(PIECE):
                yield data

    @contextmanager
    def _range(self, key: str, start: int, length: int, etag: str) -> Iterator["_Answer"]:
        asked = f"bytes={start}-{start + length - 1}"
        with self._of(key, precondition=ObjectChangedError):
            answer = self._ask(key, asked, etag)
            with closing(answer.body):
                if etag and answer.etag != etag:
                    raise ObjectChangedError(f"{self.name}/{key}: its ETag is not {etag} any more")
                # A store may ignore the range and send everything.
                size, told = answer.size, answer.range
                if size > length or not told.startswith(f"bytes {start}-{start + size - 1}/"):
                    raise WrongBytesError(
                        f"{self.name}/{key}: {size} bytes, {told}, were sent for {asked}"
                    )
                yield answer

    def peek(self, key: str, length: int, *, etag: str) -> tuple[Head, bytes]:
        with self._range(key, 0, length, etag) as answer:
            size = answer.range.rpartition("/")[2]
            if not size.isdecimal():
                raise WrongBytesError(f"{self.name}/{key}: {answer.range} says no size")
            return answer.head(int(size)), answer.body.read()

    def _ask(self, key: str, asked: str, etag: str) -> "_Answer":
        headers = {"Range": asked} | ({"If-Match": f'"{etag}"'} if etag else {})
        direct = self._direct.get(key, headers)
        if direct is not None:
            size = int(direct.headers[LENGTH])
            return _Answer(
                StreamingBody(direct.raw, size),
                size,
                direct.headers.get("content-range", "no range"),
                _etag({"ETag": direct.headers.get("etag", "")}),
                partial(_head_of, direct.headers),
            )
        match = {"IfMatch": f'"{etag}"'} if etag else {}
        answer = self._client.get_object(Bucket=self._bucket, Key=key, Range=asked, **match)
        self._direct.outdone()
        return _Answer(
            answer["Body"],
            answer["ContentLength"],
            answer.get("ContentRange", "no range"),
            _etag(answer),
            partial(_head, answer),
        )

    def head(self, key: str) -> Head:
        with self._of(key):
            answer = self._client.head_object(Bucket=self._bucket, Key=key)
            return _head(answer, answer["ContentLength"])

    def delete(self, key: str) -> None:
        with self._of(key):
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def delete_many(self, keys: Sequence[str]) -> dict[str, StoreError]:
        if not keys:
            return {}
        wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        with self._of(f"{keys[0]} and {len(keys) - 1} more"):
            answer = self._client.delete_objects(Bucket=self._bucket, Delete=wanted)
        return {
            found["Key"]: failure_of(found.get("Code", ""), 0, f"{self.name}/{found['Key']}")
            for found in answer.get("Errors", ())
        }

    def list(
        self, prefix: str, *, after: str = "", delimiter: str = "", limit: int = LIST_LIMIT
    ) -> ListingPage:
        with self._of(prefix):
            answer = self._client.list_objects_v2(
                Bucket=self._bucket,
                Prefix=prefix,
                StartAfter=after,
                Delimiter=delimiter,
                MaxKeys=limit,
            )
            more = answer["IsTruncated"]
            entries = [
                Entry(one["Key"], one["Size"], _etag(one), one["LastModified"].timestamp())
                for one in answer.get("Contents", ())
            ]
            folders = [one["Prefix"] for one in answer.get("CommonPrefixes", ())]
        ends = [entry.key for entry in entries[-1:]] + [name + _LAST for name in folders[-1:]]
        # Text compares as its UTF-8 does.
        return ListingPage(entries, folders, max(ends) if more and ends else "")

    def begin(self, key: str, metadata: Mapping[str, str]) -> str:
        with self._of(key):
            answer = self._client.create_multipart_upload(**self._at(key), Metadata=dict(metadata))
            return str(answer["UploadId"])

    def put_part(self, key: str, upload_id: str, number: int, data: Data) -> str:
        with self._of(key, missing=NoUploadError):
            answer = self._client.upload_part(
                **self._at(key), UploadId=upload_id, PartNumber=number, Body=_Body(data)
            )
            return _etag(answer)

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
        with self._of(source, precondition=ObjectChangedError):
            answer = self._client.upload_part_copy(
                **self._at(key),
                UploadId=upload_id,
                PartNumber=number,
                CopySource=self._at(source),
                CopySourceIfMatch=etag,
                CopySourceRange=f"bytes={start}-{start + length - 1}",
            )
            return _etag(answer["CopyPartResult"])

    def complete(self, key: str, upload_id: str, parts: Sequence[Part], *, once: bool) -> None:
        sent = [{"PartNumber": part.number, "ETag": f'"{part.etag}"'} for part in parts]
        with self._of(key, missing=NoUploadError, precondition=ObjectExistsError):
            self._client.complete_multipart_upload(
                **self._at(key),
                UploadId=upload_id,
                MultipartUpload={"Parts": sent},
                **_once(once=once),
            )

    def abort(self, key: str, upload_id: str) -> None:
        try:
            with self._of(key, missing=NoUploadError):
                self._client.abort_multipart_upload(**self._at(key), UploadId=upload_id)
        except NoUploadError:
            return

    def uploads(self, prefix: str) -> Iterator[Upload]:
        pages = self._client.get_paginator("list_multipart_uploads")
        with self._of(prefix):
            for page in pages.paginate(Bucket=self._bucket, Prefix=prefix):
                for one in page.get("Uploads", ()):
                    yield Upload(one["Key"], one["UploadId"], one["Initiated"].timestamp())

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": key}

    def _of(
        self,
        key: str,
        *,
        missing: type[StoreError] = NoObjectError,
        precondition: type[StoreError] = StoreError,
    ) -> AbstractContextManager[None]:
        return translated(f"{self.name}/{key}", missing=missing, precondition=precondition)


def preload() -> None:
    """Make the first client of a process; later ones are cheap, also in forked processes."""
    nobody = boto3.session.Session(
        aws_access_key_id="-",
        aws_secret_access_key="-",  # noqa: S106 (not of an account)
        region_name="us-east-1",
        botocore_session=_core(None),
    )
    nobody.client("s3").close()


def _core(profile: str | None) -> Any:  # noqa: ANN401 (untyped)
    core = botocore.session.Session(profile=profile)
    core.register_component("data_loader", _LOADER)
    return core


class _Answer(NamedTuple):
    """A GET's answer. range: its Content-Range; head: its `Head` for an object of a given size."""

    body: Any
    size: int
    range: str
    etag: str
    head: Callable[[int], Head]


class _Body:
    """Bytes that botocore reads as a file: botocore would copy a bytes object."""

    def __init__(self, data: Data) -> None:
        self._view = memoryview(data)
        self._position = 0

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int = -1) -> memoryview:
        start = self._position
        self._position = len(self._view) if size < 0 else min(start + size, len(self._view))
        return self._view[start : self._position]

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._view)}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position


def _once(*, once: bool) -> dict[str, str]:
    return {"IfNoneMatch": "*"} if once else {}


def _head(answer: Mapping[str, Any], size: int) -> Head:
    return Head(
        size,
        _etag(answer),
        answer["LastModified"].timestamp(),
        {name.lower(): text for name, text in answer.get("Metadata", {}).items()},
    )


def _head_of(headers: Mapping[str, str], size: int) -> Head:
    """The `Head` that boto3's client makes of these headers. Raises StoreError."""
    named = ((name.lower(), text) for name, text in headers.items())
    told = headers["Last-Modified"]
    try:
        modified = parsedate_to_datetime(told).timestamp()
    except (TypeError, ValueError, OverflowError) as error:
        raise StoreError(f"Last-Modified is {told!r}, expected a date") from error
    metadata = {name[len(META) :]: text for name, text in named if name.startswith(META)}
    return Head(size, _etag({"ETag": headers["ETag"]}), modified, metadata)


def _etag(answer: Mapping[str, Any]) -> str:
    return str(answer["ETag"]).strip('"')

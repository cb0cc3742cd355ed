"""The place of a bucket, as the mount options give it, without a credential.

Contract: `BucketPlace.parse` takes `s3://bucket/prefix` or raises ValueError that says what it
expected. A place is plain data, so it can be sent to a worker process. boto3 finds the credentials
(environment, profile, instance); they come from nowhere else.
"""

import re
from dataclasses import dataclass

PREFIX_MAX = 200  # bytes: keys have an end, and names want most of it

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_FOLDER = re.compile(r"[A-Za-z0-9_=.-]+")
_ENDPOINT = re.compile(
    r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?/?|https?://\[[0-9A-Fa-f:]+\](:[0-9]{1,5})?/?"
)


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """A bucket, prefix and endpoint.

    `prefix` is empty or ends in a slash. None: as boto3 finds it.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        profile: str | None = None,
    ) -> "BucketPlace":
        """Return the place of `s3://bucket/prefix`; ValueError says what was expected."""
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        folders = prefix.rstrip("/").split("/") if prefix.rstrip("/") else []
        if not url.startswith("s3://") or not _BUCKET.fullmatch(bucket):
            raise ValueError(
                "s3://BUCKET or s3://BUCKET/PREFIX, with a bucket of 3 to 63 lower-case letters, "
                "digits, dots and hyphens"
            )
        if len(prefix) > PREFIX_MAX or not all(map(_plain, folders)):
            raise ValueError(
                f"a prefix of letters, digits, _ = . - and single slashes, {PREFIX_MAX} at most"
            )
        if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
            raise ValueError("an endpoint such as https://s3.example.org:9000, nothing after it")
        return cls(bucket, "".join(f"{name}/" for name in folders), endpoint, region, profile)

    @property
    def cure(self) -> str:
        """Advice for a user whose store does not answer."""
        if self.endpoint is None:
            return "Amazon was asked: give s3_endpoint= if the bucket is another store's."
        return f"is s3_endpoint={self.endpoint} right?"

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


def _plain(name: str) -> bool:
    """Whether every client and every URL leave this part of the prefix as it is."""
    return bool(_FOLDER.fullmatch(name)) and name not in {".", "..", ".kvfs"}

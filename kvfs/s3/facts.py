"""The metadata beside an object's bytes, format 1 (docs/format.md).

Contract: pure. `Facts.metadata` gives ASCII that fits a header (2 KiB for all of them), and
`of_head` decodes it. `of_head` raises MetadataError, which names the key and the field, for
metadata that kvfs would not have written. It ignores unknown fields: a format may get more of them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from kvfs.s3 import header
from kvfs.s3.chunks import Chunks
from kvfs.s3.errors import MetadataError
from kvfs.s3.keys import escape, unescape
from kvfs.s3.store import Head

T = TypeVar("T")

FORMAT = 1
MODEL_MAX = 255  # bytes
DIGEST = "kvfs-xxh3-128"  # the field with the digest
OF_DIGEST = "digest:"  # before a digest: in place of an upload's token, it means any upload of it
OF_ETAG = "etag:"  # before an ETag: it means the object with it

_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_SIGNED = re.compile(r"0|-?[1-9][0-9]{0,18}")
_OCTAL = re.compile(r"[0-7]{4}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_KEY = re.compile(r"[0-9a-f]{16}")
_CODEC = re.compile(r"[a-z0-9][a-z0-9./-]{0,31}")
_LARGEST = (1 << 63) - 1
_LARGEST_ID = (1 << 32) - 2


@dataclass(slots=True, kw_only=True)  # frozen=True: 1.7 us each, and not 0.4
class Facts:
    """One sealed object.

    - size, digest: of the bytes that users read, and their xxh3-128.
    - stored_size, stored_digest: of the bytes in the bucket; without a codec these are the same.
    - key: its group, as `kvfs.layouts` says.
    - parent_key: the group before it in its prompt (0: not known).
    - model: the model, as `kvfs.layouts` says.
    - chunks: of the stored bytes, None if their digests were not computed.
    - header: the digest of its first bytes, as in `kvfs.s3.header`, b"" for none.
    """

    size: int
    digest: bytes
    mtime_ns: int
    mode: int
    uid: int
    gid: int
    key: int = 0
    parent_key: int = 0
    model: str = ""
    codec: str = "none"
    stored_size: int
    stored_digest: bytes
    chunks: Chunks | None = None
    header: bytes = b""

    def metadata(self) -> dict[str, str]:
        """Return it as user metadata of S3."""
        model = self.model.encode("utf-8", "surrogateescape")[:MODEL_MAX]
        return {
            "kvfs-format": str(FORMAT),
            "kvfs-size": str(self.size),
            DIGEST: self.digest.hex(),
            "kvfs-codec": self.codec,
            "kvfs-stored-size": str(self.stored_size),
            "kvfs-stored-xxh3-128": self.stored_digest.hex(),
            "kvfs-mtime-ns": str(self.mtime_ns),
            "kvfs-mode": f"{self.mode:04o}",
            "kvfs-uid": str(self.uid),
            "kvfs-gid": str(self.gid),
            "kvfs-key": f"{self.key:016x}",
            "kvfs-parent-key": f"{self.parent_key:016x}",
            "kvfs-model": escape(model),
            **({} if self.chunks is None else self.chunks.metadata()),
            **header.metadata(self.header),
        }

    @classmethod
    def of_head(cls, key: str, head: Head) -> "Facts":
        """Return the facts of the object that has this key. Raises MetadataError."""

        def field(name: str, read: Callable[[str], T | None]) -> T:
            text = head.metadata.get(f"kvfs-{name}")
            value = None if text is None else read(text)
            if value is None:
                raise MetadataError(f"{key}: metadata kvfs-{name} is {_shown(text)}")
            return value

        found = field("format", _number(_NUMBER))
        if found != FORMAT:
            raise MetadataError(f"{key}: metadata of format {found}, this kvfs knows {FORMAT}")
        facts = cls(
            size=field("size", _number(_NUMBER)),
            digest=field("xxh3-128", _digest),
            codec=field("codec", lambda text: text if _CODEC.fullmatch(text) else None),
            stored_size=field("stored-size", _number(_NUMBER)),
            stored_digest=field("stored-xxh3-128", _digest),
            mtime_ns=field("mtime-ns", _number(_SIGNED)),
            mode=field("mode", _number(_OCTAL, base=8)),
            uid=field("uid", _number(_NUMBER, most=_LARGEST_ID)),
            gid=field("gid", _number(_NUMBER, most=_LARGEST_ID)),
            key=field("key", _number(_KEY, base=16)),
            parent_key=field("parent-key", _number(_KEY, base=16)),
            model=field("model", _model),
        )
        chunks = Chunks.of_metadata(key, head.metadata, facts.stored_size)
        facts = replace(facts, chunks=chunks, header=header.of_metadata(key, head.metadata))
        same = (facts.size, facts.digest) == (facts.stored_size, facts.stored_digest)
        if facts.codec == "none" and not same:
            raise MetadataError(
                f"{key}: the stored bytes differ from the object, but have no codec"
            )
        if facts.stored_size != head.size:
            raise MetadataError(
                f"{key}: has {head.size} bytes, metadata kvfs-stored-size says {facts.stored_size}"
            )
        return facts


def _number(
    pattern: re.Pattern[str], *, base: int = 10, most: int = _LARGEST
) -> Callable[[str], int | None]:
    def read(text: str) -> int | None:
        if not pattern.fullmatch(text):
            return None
        value = int(text, base)
        return value if -most <= value <= most else None

    return read


def _digest(text: str) -> bytes | None:
    return bytes.fromhex(text) if _DIGEST.fullmatch(text) else None


def _model(text: str) -> str | None:
    data = unescape(text)
    if data is None or len(data) > MODEL_MAX:
        return None
    return data.decode("utf-8", "surrogateescape")


def _shown(text: str | None) -> str:
    return "missing" if text is None else repr(text[:80])

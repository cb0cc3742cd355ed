"""Which key an object has in the bucket, and which object a key means. Format 1 (docs/format.md).

    PREFIX NAMESPACE@VERSION/DIRECTORY/NAME

Contract: pure. Each name has one key, and each key at most one name, for any bytes in the name.
Keys have only printable ASCII, and people can read them. Listing below a `/` is listing a
directory. A byte outside of `_PLAIN` is %XX; `.` and `..` are %2E and %2E%2E, because HTTP clients
resolve them; an empty part is %00. An object whose key would be longer than KEY_MAX is at
PREFIX%/SHA256, and PREFIX.kvfs/names/SHA256 has its name. A lookup needs the hash only; a listing
reads the name as well.
"""

import hashlib
import re
from typing import NamedTuple

from kvfs.s3.errors import MetadataError

# S3 allows 1024. Ceph 16 has 1024 for that and the bucket's id, and an upload's id for parts:
# 990 went well, 1013 was answered with 500.
KEY_MAX = 896
OWN = ".kvfs/"  # below the prefix: objects that belong to no namespace

_PLAIN = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.=,~!()@"
_ESCAPED = re.compile(r"%([0-9A-F]{2})")
_TAIL = re.compile(r"([^@/]*)@(0|[1-9][0-9]{0,18})/(.+)", re.DOTALL)
_HASH = re.compile(r"[0-9a-f]{64}")


class ObjectName(NamedTuple):
    """An object as users know it. `path`: from the namespace's directory down; no NUL in either.

    The mount's own namespace is b"".
    """

    namespace: bytes
    version: int
    path: bytes


class Space(NamedTuple):
    """A namespace in one of its versions: what a folder of the bucket has. As text: `lmcache@1`."""

    namespace: bytes
    version: int

    def __str__(self) -> str:
        return f"{_namespace(self.namespace)}@{self.version}"

    @classmethod
    def parse(cls, text: str) -> "Space | None":
        """Return the `Space` whose `str` is this text; None if there is none."""
        name = _parse(f"{text}/x")
        return None if name is None or name.path != b"x" else cls(*name[:2])


class Keys:
    """The keys below one prefix, which is empty or ends in a slash."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.own = prefix + OWN
        self.names = f"{self.own}names/"
        self.aside = f"{self.own}aside/"
        self.nodes = f"{self.own}nodes/"
        self.probes = f"{self.own}probe/"
        self.long = f"{prefix}%/"

    def of(self, name: ObjectName) -> str:
        """Return the key of an object."""
        key = self.prefix + _tail(name)
        return key if len(key) <= KEY_MAX else self.long + _hash(name)

    def record(self, name: ObjectName) -> tuple[str, bytes] | None:
        """Return key and content of the record that must precede an object with a hash as key."""
        if not self.of(name).startswith(self.long):
            return None
        return self.names + _hash(name), _tail(name).encode()

    def folder(self, namespace: bytes, version: int, path: bytes = b"") -> str:
        """Return the common start of all keys below a directory, except hashes of long names."""
        within = _tail(ObjectName(namespace, version, path)) + "/" if path else ""
        return self.prefix + (within or f"{_namespace(namespace)}@{version}/")

    def versions(self, namespace: bytes) -> str:
        """Return the common start of a namespace's folders, in all versions."""
        return f"{self.prefix}{_namespace(namespace)}@"

    def parse_folder(self, folder: str) -> ObjectName | None:
        """Return the directory whose keys begin with `folder`; its path may be b""."""
        below = self.parse(f"{folder}x")
        return None if below is None else below._replace(path=below.path.rpartition(b"/")[0])

    def parse(self, key: str) -> ObjectName | None:
        """Return the name in a key; None if kvfs did not name it, or the key is a hash."""
        name = _parse(key[len(self.prefix) :]) if key.startswith(self.prefix) else None
        return name if name is not None and self.of(name) == key else None

    def record_of(self, key: str) -> str:
        """Return the key of the record that has an object's name; "" if the key itself has it."""
        hashed = key.removeprefix(self.long)
        return self.names + hashed if hashed != key and _HASH.fullmatch(hashed) else ""

    def parse_record(self, key: str, content: bytes) -> ObjectName:
        """Return the name in a record.

        Raises MetadataError if the name does not fit the record's key.
        """
        try:
            name = _parse(content.decode("ascii"))
        except UnicodeDecodeError:
            name = None
        if name is None or self.names + _hash(name) != key:
            raise MetadataError(f"{key}: has no name, or its key is that of another name")
        return name


def escape(data: bytes) -> str:
    """Return one part of a path, as text that is safe in keys and headers."""
    if not data.strip(b"."):  # "." and ".."; an empty part becomes a NUL, which no name has
        return "%2E" * len(data) or "%00"
    if not data.translate(None, _PLAIN):  # most names: 0.3 us for 32 bytes, and not 1.8
        return data.decode("ascii")
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in data)


def unescape(text: str) -> bytes | None:
    """Return the bytes of an escaped part; None if `escape` cannot have made that text."""
    try:
        found = _ESCAPED.sub(lambda hit: chr(int(hit[1], 16)), text).encode("latin-1")
    except UnicodeEncodeError:
        return None
    data = b"" if found == b"\0" else found
    return data if b"\0" not in data and escape(data) == text else None


def _namespace(name: bytes) -> str:
    return escape(name).replace("@", "%40") if name else ""


def _tail(name: ObjectName) -> str:
    path = "/".join(map(escape, name.path.split(b"/")))
    return f"{_namespace(name.namespace)}@{name.version}/{path}"


def _hash(name: ObjectName) -> str:
    # Not xxh3: a user who chooses names could choose two with one key.
    return hashlib.sha256(_tail(name).encode()).hexdigest()


def _parse(tail: str) -> ObjectName | None:
    found = _TAIL.fullmatch(tail)
    if found is None:
        return None
    namespace = unescape(found[1].replace("%40", "@")) if found[1] else b""
    parts = [unescape(part) for part in found[3].split("/")]
    if namespace is None or None in parts:
        return None
    name = ObjectName(
        namespace, int(found[2]), b"/".join(part for part in parts if part is not None)
    )
    return name if _tail(name) == tail else None

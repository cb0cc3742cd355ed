"""Names of cached prefixes: the chain of block keys, and the paths that they make.

A prompt's token ids are cut into blocks of `block_tokens`. Each block has a key that stands for all
tokens up to its end and for all that makes its bytes differ, the namespace's fingerprint:

    root      = XXH3-128(fingerprint, UTF-8)
    key[i]    = XXH3-128(key[i - 1] + tokens of block i as little-endian int32), key[-1] = root
    path[i]   = <key[i - 1]>/<key[i]>[.<shard>], keys as 32 lower-case hexadecimal digits

Contract: pure, and the only home of the format, which docs/prefix-paths.md specifies for other
languages, with test vectors. Keys are the 16 bytes of the digest in XXH3's canonical (big-endian)
order. A part of a block at the end has no key. Needs nothing but xxhash: engines import this. Not
for what is in a file (`kvfs.client`), nor for what a mount does with such names.
"""

import json
import re
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from xxhash import xxh3_128_digest

KEY_BYTES = 16
TOKEN_MAX = (1 << 31) - 1
_NAME = re.compile(r"([0-9a-f]{32})(?:\.([0-9A-Za-z_-]{1,32}))?(?:\.([0-9a-z]{1,32})\.tmp)?")
_SHARD = re.compile(r"[0-9A-Za-z_-]{1,32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """All that makes the bytes of a block differ, beside its tokens.

    model, revision: whose cache it is, as its maker calls it. dtype: of a number, as torch says it
    ("bfloat16"). layout: the shape of one block, axes by name. block_tokens: tokens of a block.
    tokenizer, adapter: where they can differ for one model; "" if there is none. storage: how
    numbers are stored, "raw" for as they are. shards: files of a block, one for each rank.
    """

    model: str
    revision: str
    dtype: str
    layout: str
    block_tokens: int
    tokenizer: str = ""
    adapter: str = ""
    storage: str = "raw"
    shards: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not field.type:
                wanted = getattr(field.type, "__name__", field.type)
                raise TypeError(f"{field.name}={value!r}: expected {wanted}")
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{field.name}={value}: expected at least 1")
        if not self.model:
            raise ValueError("model='': expected what the model is called")

    def __str__(self) -> str:
        """The text that the root key is made of: JSON, names sorted, ASCII, without spaces."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @property
    def root(self) -> bytes:
        return root_key(str(self))


class Name(NamedTuple):
    """What the name of a file says: of which block, which shard ("" for the whole of it)."""

    key: bytes
    shard: str = ""
    temporary: bool = False


def root_key(fingerprint: str) -> bytes:
    """Return the key before the first block of every prompt."""
    return xxh3_128_digest(fingerprint.encode())


def block_keys(root: bytes, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Return the keys of all whole blocks of a prompt, the first one's parent being `root`.

    tokens: ids from 0 to 2**31 - 1, in any sequence, also an array, a numpy array or a tensor on
    the CPU. Raises ValueError or TypeError.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens={block_tokens}: expected at least 1")
    check_key(root, "root")
    data = _packed(tokens)
    step = 4 * block_tokens
    keys, key = [], root
    for start in range(0, len(data) - step + 1, step):
        key = xxh3_128_digest(key + data[start : start + step])
        keys.append(key)
    return keys


def _packed(tokens: Sequence[int]) -> bytes:
    """Little-endian int32s."""
    numbers = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    try:
        packed = array("i", numbers)
    except (TypeError, OverflowError) as error:
        raise _bad_token(numbers, error) from None
    if packed and min(packed) < 0:
        raise _bad_token(numbers, ValueError("negative"))
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _bad_token(numbers: Sequence[int], error: Exception) -> Exception:
    wanted = f"expected an int from 0 to {TOKEN_MAX}"
    try:
        for at, token in enumerate(numbers):
            if not isinstance(token, int):
                return TypeError(f"tokens[{at}]={token!r}: {wanted}")
            if not 0 <= token <= TOKEN_MAX:
                return ValueError(f"tokens[{at}]={token}: {wanted}")
    except TypeError:
        return TypeError(f"tokens={numbers!r}: expected a sequence of ints")
    return TypeError(f"tokens: {wanted} each ({error})")


def check_key(key: object, what: str = "key") -> bytes:
    """Return it. Raises TypeError or ValueError."""
    if not isinstance(key, bytes):
        raise TypeError(f"{what}={key!r}: expected {KEY_BYTES} bytes")
    if len(key) != KEY_BYTES:
        raise ValueError(f"{what}={key.hex()}: expected {KEY_BYTES} bytes, got {len(key)}")
    return key


def check_shard(shard: str) -> str:
    """Return it. Raises ValueError."""
    if shard and not _SHARD.fullmatch(shard):
        raise ValueError(f"shard={shard!r}: expected up to 32 letters, digits, _ or -")
    return shard


def name(key: bytes, shard: str = "") -> str:
    """Return the name of a block's file in the directory of its parent."""
    suffix = f".{check_shard(shard)}" if shard else ""
    return f"{check_key(key).hex()}{suffix}"


def path(parent: bytes, key: bytes, shard: str = "") -> str:
    """Return a block's path below its namespace."""
    return f"{check_key(parent, 'parent').hex()}/{name(key, shard)}"


def parse(name: str) -> Name | None:
    """Return what a file's name says; None if it is none of these."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    key, shard, unfinished = found.groups()
    return Name(bytes.fromhex(key), shard or "", temporary=unfinished is not None)

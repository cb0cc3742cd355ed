"""Names of cached prefixes: the chain of block keys, and the paths that they make.

A prompt's token ids are cut into blocks of `block_tokens`. Each block has a key. It stands for all
tokens up to the block's end and for the namespace's fingerprint, which has all else that changes
bytes:

    root      = XXH3-128(fingerprint, UTF-8)
    key[i]    = XXH3-128(key[i - 1] + tokens of block i as little-endian int32), key[-1] = root
    path[i]   = <key[i - 1]>/<key[i]>[.<shard>], keys as 32 lower-case hexadecimal digits

Contract: pure, and the only home of the format, which docs/prefix-paths.md specifies for other
languages, with test vectors. Keys are the 16 bytes of the digest in XXH3's canonical (big-endian)
order. A part of a block at the end has no key. The module needs only xxhash, because engines import
it. Not for the content of a file (`kvfs.client`), nor for a mount's treatment of such names.
"""

import json
import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from operator import index
from typing import Any, NamedTuple, Protocol, TypeAlias

from xxhash import xxh3_128_digest

KEY_BYTES = 16
TOKEN_MAX = (1 << 31) - 1
SHOWN = 60  # characters of a wrong value that a message repeats
# "tmp" is no shard: KEY.tmp is an unfinished file of a writer that left out the random part.
_SHARD_TEXT = r"(?!tmp(?:\.|\Z))[0-9A-Za-z_-]{1,32}"
_SHARD = re.compile(_SHARD_TEXT)
_NAME = re.compile(rf"([0-9a-f]{{32}})(?:\.({_SHARD_TEXT}))?(?:\.([0-9a-z]{{1,32}})\.tmp)?")


class Array(Protocol):
    """The common interface of a numpy array and a torch tensor."""

    def tolist(self) -> object:
        """Return the numbers."""


Tokens: TypeAlias = Sequence[int] | Array
_Any: TypeAlias = Any  # of a library that is not imported here
# An array would take bytes for the memory of its numbers; a set has no order.
_NO_SEQUENCES = (str, bytes, bytearray, dict, set, frozenset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """All settings that change the bytes of a block, beside its tokens.

    - model, revision: the model of the cache, as its maker calls it.
    - dtype: of a number, as torch names it ("bfloat16").
    - layout: the shape of one block, axes by name.
    - block_tokens: tokens of a block.
    - tokenizer, adapter: if they can differ for one model; "" if there is none.
    - storage: the form of stored numbers, "raw" for unchanged.
    - shards: files of a block, one for each rank.
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
        """Return the text for the root key: JSON, names sorted, ASCII, without spaces."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @property
    def root(self) -> bytes:
        return root_key(str(self))


class BlockName(NamedTuple):
    """The facts in a file's name: the block, and the shard ("" for the whole block)."""

    key: bytes
    shard: str = ""
    temporary: bool = False


def root_key(fingerprint: str) -> bytes:
    """Return the key before the first block of every prompt."""
    return xxh3_128_digest(fingerprint.encode())


def block_keys(root: bytes, tokens: Tokens, block_tokens: int) -> list[bytes]:
    """Return the keys of all whole blocks of a prompt, the first one's parent being `root`.

    tokens: ids from 0 to 2**31 - 1, in a list or another sequence of integers. An array of numpy or
    a tensor will do as well, of integers, of one dimension, on the CPU. Raises ValueError for a
    number or a shape that is out of range, TypeError for a value that is no number.
    """
    if not isinstance(block_tokens, int):
        raise TypeError(f"block_tokens={block_tokens!r}: expected an int")
    if block_tokens < 1:
        raise ValueError(f"block_tokens={block_tokens}: expected at least 1")
    key = check_key(root, "root")
    data = _packed(tokens)
    step = 4 * block_tokens
    keys = []
    for start in range(0, len(data) - step + 1, step):
        key = xxh3_128_digest(key + data[start : start + step])
        keys.append(key)
    return keys


def _packed(tokens: _Any) -> bytes:
    """Pack tokens as int32s, little-endian: 0.9 ms for 64,000 in a list, 0.1 ms in an array."""
    if isinstance(tokens, _NO_SEQUENCES):
        raise TypeError(f"tokens={_short(tokens)}: expected a sequence of ints")
    if hasattr(tokens, "data_ptr"):
        tokens = _shared(tokens)
    if hasattr(tokens, "__array_interface__"):
        return _packed_array(tokens)
    try:
        packed = array("i", tokens)
    except (TypeError, OverflowError) as error:
        raise _bad_token(tokens, error) from None
    data = packed.tobytes()
    if sys.byteorder == "big":
        data = b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4))
    # The highest bit of a number is its sign; looking for it costs a fiftieth of min().
    if not data[3::4].isascii():
        raise _bad_token(packed, ValueError("negative"))
    return data


def _shared(tensor: _Any) -> _Any:
    """Return the tensor's memory as an array, or its numbers in a list if that is impossible."""
    if tensor.device.type != "cpu":
        raise ValueError(f"tokens on {tensor.device}: expected a tensor on the CPU: tokens.cpu()")
    try:
        return tensor.detach().numpy()
    except (RuntimeError, TypeError):  # torch without numpy; a dtype that numpy does not have
        return tensor.tolist()


def _packed_array(numbers: _Any) -> bytes:
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"tokens of {numbers.dtype}: expected integers")
    if numbers.ndim != 1:
        raise ValueError(f"tokens of shape {tuple(numbers.shape)}: expected one dimension")
    if numbers.size and not 0 <= numbers.min() <= numbers.max() <= TOKEN_MAX:
        raise _bad_token(numbers.tolist(), ValueError("out of range"))
    data: bytes = numbers.astype("<i4").tobytes()
    return data


def _bad_token(numbers: Iterable[object], error: Exception) -> Exception:
    wanted = f"expected an int from 0 to {TOKEN_MAX}"
    try:
        for at, token in enumerate(numbers):
            try:
                number = index(token)  # type: ignore[arg-type]
            except TypeError:
                return TypeError(f"tokens[{at}]={_short(token)}: {wanted}")
            if not 0 <= number <= TOKEN_MAX:
                return ValueError(f"tokens[{at}]={number}: {wanted}")
    except TypeError:
        return TypeError(f"tokens={_short(numbers)}: expected a sequence of ints")
    return TypeError(f"tokens: {wanted} each ({error})")


def _short(value: object) -> str:
    """Return a value cut for a message, because it may be a prompt."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def check_key(key: object, what: str = "key") -> bytes:
    """Return the checked key. Raises TypeError or ValueError."""
    if not isinstance(key, bytes):
        raise TypeError(f"{what}={key!r}: expected {KEY_BYTES} bytes")
    if len(key) != KEY_BYTES:
        raise ValueError(f"{what}={key.hex()}: expected {KEY_BYTES} bytes, got {len(key)}")
    return key


def check_shard(shard: str) -> str:
    """Return the checked shard. Raises TypeError or ValueError."""
    if not isinstance(shard, str):
        raise TypeError(f"shard={_short(shard)}: expected a str")
    if shard and not _SHARD.fullmatch(shard):
        raise ValueError(
            f"shard={_short(shard)}: expected up to 32 letters, digits, _ or -, and not tmp"
        )
    return shard


def name(key: bytes, shard: str = "") -> str:
    """Return the name of a block's file in the directory of its parent."""
    check_shard(shard)
    return f"{check_key(key).hex()}.{shard}" if shard else check_key(key).hex()


def path(parent: bytes, key: bytes, shard: str = "") -> str:
    """Return a block's path below its namespace."""
    return f"{check_key(parent, 'parent').hex()}/{name(key, shard)}"


def parse(name: str) -> BlockName | None:
    """Return the facts of a file's name; None if it is no block's name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    key, shard, unfinished = found.groups()
    return BlockName(bytes.fromhex(key), shard or "", temporary=unfinished is not None)

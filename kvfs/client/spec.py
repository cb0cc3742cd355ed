"""The description of one block of a cache: its model, its tokens and its tensor.

Contract: a `Spec` is immutable and checked when it is made. Two specs that differ in anything that
changes bytes have different fingerprints, and so no key in common. Not for the place of blocks
(`kvfs.client.cache`), nor for the making of names (`kvfs.prefix`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType

import torch

from kvfs.client.storage import BlockStorage, storage
from kvfs.prefix import Fingerprint, block_keys

TOKEN = "token"  # noqa: S105  # the axis that every block has


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A block's tensor, and all else beside its tokens that changes its bytes.

    - model, revision, tokenizer, adapter: as `kvfs.prefix.Fingerprint` has them.
    - dtype: a torch.dtype or its name, "bfloat16".
    - axes: the names and lengths of one file's axes in the order of its shape. "token" is one of
      them, the tokens of a block.
    - storage: "raw", the bytes of the tensor, or a form with fewer, as `kvfs.client.storage` has
      it.
    - shards: the number of files of a block. With more than one, `axes` describes one rank's file.

    Raises TypeError and ValueError, which name the argument, its value and the expected one.
    """

    model: str
    revision: str
    dtype: torch.dtype | str
    axes: Mapping[str, int]
    tokenizer: str = ""
    adapter: str = ""
    storage: str = "raw"
    shards: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _dtype(self.dtype))
        object.__setattr__(self, "axes", MappingProxyType(_axes(self.axes)))
        _ = self.stored, self.fingerprint  # check the rest

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """Return `dtype` as a torch.dtype, which it is once the spec is made."""
        assert isinstance(self.dtype, torch.dtype)
        return self.dtype

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(
            model=self.model,
            revision=self.revision,
            dtype=str(self.torch_dtype).removeprefix("torch."),
            layout=",".join(f"{name}={length}" for name, length in self.axes.items()),
            block_tokens=self.axes[TOKEN],
            tokenizer=self.tokenizer,
            adapter=self.adapter,
            storage=self.storage,
            shards=self.shards,
        )

    @cached_property
    def root(self) -> bytes:
        """Return the key before the first block of every prompt: the parent of first blocks."""
        return self.fingerprint.root

    @cached_property
    def shape(self) -> torch.Size:
        return torch.Size(self.axes.values())

    @property
    def block_tokens(self) -> int:
        return self.axes[TOKEN]

    @cached_property
    def block_bytes(self) -> int:
        """Return the bytes of a block's tensor in memory."""
        return prod(self.shape) * self.torch_dtype.itemsize

    @cached_property
    def stored(self) -> BlockStorage:
        """Return the form in which a block's tensor is stored in its file."""
        return storage(self.storage, self.axes, self.torch_dtype)

    @property
    def stored_bytes(self) -> int:
        """Return the exact bytes of a block's file."""
        return self.stored.stored_bytes

    @cached_property
    def shard_names(self) -> tuple[str, ...]:
        """Return the endings of a block's file names: "" alone, or "0", "1" and so on."""
        return tuple(map(str, range(self.shards))) if self.shards > 1 else ("",)

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the keys of the prompt's whole blocks. tokens: see `kvfs.prefix.block_keys`."""
        return block_keys(self.root, tokens, self.block_tokens)


def _dtype(given: object) -> torch.dtype:
    wanted = "expected a torch.dtype or its name, as 'bfloat16'"
    if not isinstance(given, str | torch.dtype):
        raise TypeError(f"dtype={given!r}: {wanted}")
    named = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if isinstance(named, torch.dtype):
        return named
    raise ValueError(f"dtype={given!r}: {wanted}")


def _axes(given: object) -> dict[str, int]:
    if not isinstance(given, Mapping):
        raise TypeError(f"axes={given!r}: expected lengths by name, as {{'token': 64, 'dim': 128}}")
    for name, length in given.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"axes: the name {name!r}: expected letters, digits and _")
        if type(length) is not int or length < 1:
            raise ValueError(f"axes[{name!r}]={length!r}: expected an int of at least 1")
    if TOKEN not in given:
        raise ValueError(
            f"axes={dict(given)}: expected {TOKEN!r} among them, the tokens of a block"
        )
    return dict(given)

"""Checks tensors and lists of callers before the client reads or writes anything.

Contract: TypeError and ValueError name the argument, its value and the expected one. The results
have one tensor for each block.
"""

import os
from collections.abc import Sequence
from itertools import pairwise

import torch

from kvfs.client.spec import Spec
from kvfs.prefix import check_key

_DEVICES = {"cpu", "cuda"}
BlockTensors = torch.Tensor | Sequence[torch.Tensor]


def blocks_of(given: BlockTensors, spec: Spec, what: str) -> list[torch.Tensor]:
    """Return one tensor for each block of `[n, *spec.shape]`, or of a list of `spec.shape`."""
    if isinstance(given, torch.Tensor):
        _check_stack(given, spec, what)
        return list(given.unbind())
    if not isinstance(given, list | tuple):
        raise TypeError(f"{what}: expected a tensor, or a list of tensors, got {type(given)}")
    blocks = list(given)
    for at, block in enumerate(blocks):
        _check_block(block, spec, f"{what}[{at}]")
        if block.device != blocks[0].device:
            raise ValueError(
                f"{what}[{at}]: expected a tensor on {blocks[0].device} like the first, "
                f"got one on {block.device}"
            )
    return blocks


def _check_stack(given: torch.Tensor, spec: Spec, what: str) -> None:
    if given.shape[1:] != spec.shape or given.dim() != len(spec.shape) + 1:
        raise ValueError(
            f"{what}: expected {spec.dtype} (n, {', '.join(map(str, spec.shape))}), "
            f"got {given.dtype} {tuple(given.shape)}"
        )
    if len(given):  # they are all alike
        _check_block(given[0], spec, f"{what}[0]")


def _check_block(block: object, spec: Spec, what: str) -> None:
    wanted = f"{spec.dtype} {tuple(spec.shape)}"
    if not isinstance(block, torch.Tensor):
        raise TypeError(f"{what}: expected a tensor {wanted}, got {type(block)}")
    if block.shape != spec.shape or block.dtype != spec.dtype:
        raise ValueError(f"{what}: expected {wanted}, got {block.dtype} {tuple(block.shape)}")
    if block.layout != torch.strided or block.device.type not in _DEVICES:
        got = f"{block.layout} on {block.device}"
        raise ValueError(f"{what}: expected a dense tensor on cpu or cuda, got {got}")


def targets_of(given: BlockTensors, spec: Spec, device: torch.device | None) -> BlockTensors:
    """Return the tensors to load blocks into, on `device` if given; contiguous ones there."""
    if isinstance(given, torch.Tensor) and given.is_contiguous():
        _check_stack(given, spec, "out")
        _check_device(given, device)
        return given
    blocks = blocks_of(given, spec, "out")
    if blocks:
        _check_device(blocks[0], device)
    for at, block in enumerate(blocks):
        got = f"strides {block.stride()}"
        if block.device.type != "cpu" and not block.is_contiguous():
            raise ValueError(f"out[{at}]: expected a contiguous tensor, got {got}")
        if 0 in (stride for n, stride in zip(block.shape, block.stride(), strict=True) if n > 1):
            raise ValueError(f"out[{at}]: expected memory of its own for each number, got {got}")
    _check_apart(blocks)
    return blocks


def _check_device(first: torch.Tensor, device: torch.device | None) -> None:
    if device is not None and first.device != device:
        raise ValueError(f"out: expected tensors on {device}, got {first.device}")


def _check_apart(blocks: list[torch.Tensor]) -> None:
    """Raises ValueError if a block begins, or lies, in another; views of one tensor are fine."""
    places = sorted((block.data_ptr(), at) for at, block in enumerate(blocks) if block.numel())
    for (start, at), (after, other) in pairwise(places):
        whole = blocks[at].is_contiguous() and blocks[other].is_contiguous()
        if after == start or (whole and after < start + blocks[at].nbytes):
            raise ValueError(
                f"out[{at}], out[{other}]: expected memory of its own for each block, "
                "got the same for both"
            )


def directory_of(given: str | os.PathLike[str]) -> str:
    """Return the directory as text."""
    path = os.fspath(given)
    if not isinstance(path, str):
        raise TypeError(f"path={path!r}: expected text or a path, got {type(path)}")
    if not path:
        raise ValueError("path='': expected the directory of a namespace")
    return path


def device_of(given: torch.device | str | None) -> torch.device:
    """Return the device with its number; None is the CPU."""
    if given is None:
        return torch.device("cpu")
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={given!r}: expected 'cpu' or 'cuda' ({error})") from None
    if device.type not in _DEVICES:
        raise ValueError(f"device={given!r}: expected 'cpu' or 'cuda'")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise ValueError(f"device={given!r}: expected 'cpu': there is no CUDA device")
    number = device.index if ":" in str(device) else torch.cuda.current_device()
    if number >= count:
        raise ValueError(f"device={given!r}: expected cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", number)


def keys_of(parent: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """Return a checked chain of keys; its parent is checked too."""
    check_key(parent, "parent")
    return [check_key(key, f"keys[{at}]") for at, key in enumerate(keys)]


def count_of(given: int | None, what: str, most: int) -> int:
    """Return the count, or `most` if it is None or more."""
    if given is None:
        return most
    if type(given) is not int:
        raise TypeError(f"{what}={given!r}: expected an int")
    if given < 0:
        raise ValueError(f"{what}={given}: expected at least 0")
    return min(given, most)


def shard_of(given: str | int | None, spec: Spec) -> str | None:
    """Return the shard's name; "" is a block's only file, None is none of several."""
    if given is None:
        return "" if spec.shards == 1 else None
    if str(given) not in spec.shard_names or isinstance(given, bool):
        expected = "None" if spec.shards == 1 else f"0 to {spec.shards - 1}"
        raise ValueError(f"shard={given!r}: expected {expected}")
    return str(given)

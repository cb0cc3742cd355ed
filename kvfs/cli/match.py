"""`kvfs match`: the cached prefix of a prompt, the place of its blocks, and the blocks after it."""

import bisect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from kvfs import matching, prefix, runtime
from kvfs.cli import completion, disregard_lookups, give, human, json_option, unreachable
from kvfs.cli.ns import Named
from kvfs.cli.screen import pairs, screen
from kvfs.errors import ConfigError, KvfsError

FINGERPRINT = "user.kvfs.fingerprint"
FEW = 8  # tokens in a line


class _Spec(NamedTuple):
    """The parts of the namespace's fingerprint that a match needs."""

    root: bytes
    block_tokens: int
    shards: tuple[str, ...]


@click.command
@click.argument("namespace", metavar="NAMESPACE", shell_complete=completion.namespaces)
@click.option(
    "--tokens",
    "file",
    required=True,
    type=click.File("rb"),
    help=(
        "File with the token ids of the prompt: a JSON list, or numbers and spaces; - for stdin."
    ),
)
@click.option(
    "--shards",
    help=("Names of the files of a block, joined by commas. Default: as in the fingerprint."),
)
@json_option
def command(namespace: str, file: Any, *, shards: str | None, as_json: bool) -> None:  # noqa: ANN401 - click's file
    """Show how much of a prompt is cached in NAMESPACE.

    NAMESPACE is a path, also on an NFS client. Its name alone works if one kvfs is mounted.
    """
    directory = _directory(namespace)
    spec = _spec(directory)
    if shards is not None:
        try:
            names = tuple(map(prefix.check_shard, shards.split(",")))
        except ValueError as error:
            raise ConfigError(f"--shards {shards}: {error}") from error
        spec = spec._replace(shards=names)
    tokens = _tokens(file.read(), getattr(file, "name", "-"))
    try:
        keys = prefix.block_keys(spec.root, tokens, spec.block_tokens)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    found = _describe(directory, spec, tokens, keys)
    give(found, lambda _: screen().print(pairs(_rows(found))), as_json=as_json)


def _directory(namespace: str) -> Path:
    if os.sep not in namespace:
        named = Named(namespace)
        namespace = str(named.mountpoint / named.name)
    disregard_lookups(namespace)
    path = Path(os.path.realpath(namespace))
    try:
        if not path.is_dir():
            raise ConfigError(f"namespace {namespace}: expected a directory")
    except OSError as error:
        raise unreachable(path, error) from error
    return path


def _spec(directory: Path) -> _Spec:
    """Return the specification of the namespace. Raises ConfigError."""
    try:
        text = os.getxattr(directory, FINGERPRINT).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"{directory}: {FINGERPRINT}: {error.strerror}") from error
    if not text:
        raise ConfigError(
            f"namespace {directory} has no fingerprint: expected one that kvfs.client has opened"
        )
    try:
        told = json.loads(text)
        made = prefix.Fingerprint(**told)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"namespace {directory}: fingerprint={text!r}: expected the JSON of kvfs.client, "
            f"with model, revision, dtype, layout and block_tokens ({error})"
        ) from error
    names = tuple(map(str, range(made.shards))) if made.shards > 1 else ("",)
    return _Spec(made.root, made.block_tokens, names)


def _tokens(data: bytes, name: str) -> list[int]:
    """Return the tokens of a prompt. Raises ConfigError."""
    try:
        text = data.decode()
        found = json.loads(text) if text.lstrip().startswith("[") else list(map(int, text.split()))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--tokens {name}: expected token ids, a JSON list or numbers ({error})"
        ) from error
    if not isinstance(found, list):
        raise ConfigError(f"--tokens {name}: expected a list of token ids")
    return found


def _describe(
    directory: Path, spec: _Spec, tokens: Sequence[int], keys: list[bytes]
) -> dict[str, Any]:
    answer = _ask(directory, spec, keys)
    way = "stat" if answer is None else "match"
    blocks = _bisect(directory, spec, keys) if answer is None else answer.blocks
    parent = keys[blocks - 1] if blocks else spec.root
    first = blocks * spec.block_tokens
    after = None
    if blocks < len(keys):
        after = {
            "path": prefix.path(parent, keys[blocks], spec.shards[0]),
            "first_token": first,
            "tokens": list(tokens[first : first + spec.block_tokens]),
        }
    return {
        "namespace": str(directory),
        "blocks": blocks,
        "of_blocks": len(keys),
        "tokens": first,
        "of_tokens": len(tokens),
        "block_tokens": spec.block_tokens,
        "asked_by": way,
        "bytes": None
        if answer is None
        else {"ram": answer.ram, "nvme": answer.nvme, "s3": answer.bucket},
        "last": parent.hex(),
        "next": after,
        "continuations": _continuations(directory, parent),
    }


def _ask(directory: Path, spec: _Spec, keys: list[bytes]) -> matching.MatchAnswer | None:
    """Ask in one call for each 65536 blocks; None where the file system does not answer."""
    try:
        descriptor = os.open(directory / matching.NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # an NFS client, or another file system
        return None
    try:
        total = matching.MatchAnswer(0, 0, 0, 0)
        for start in range(0, len(keys) or 1, matching.KEYS_MAX):
            part = keys[start : start + matching.KEYS_MAX]
            parent = keys[start - 1] if start else spec.root
            shards = () if spec.shards == ("",) else spec.shards
            os.pwrite(descriptor, matching.pack_request(parent, part, shards), 0)
            found = matching.unpack_answer(os.pread(descriptor, matching.answer_size(len(part)), 0))
            blocks, ram, nvme, bucket = map(sum, zip(total[:4], found[:4], strict=True))
            total = matching.MatchAnswer(blocks, ram, nvme, bucket)
            if found.blocks < len(part):
                break
    except (OSError, ValueError) as error:
        raise KvfsError(f"{directory / matching.NAME}: {error}") from error
    finally:
        os.close(descriptor)
    return total


def _bisect(directory: Path, spec: _Spec, keys: list[bytes]) -> int:
    """Count the leading blocks by some 2 log n stats: a block needs all blocks before it."""

    def there(at: int) -> bool:
        parent = keys[at - 1] if at else spec.root
        return all(
            os.path.isfile(directory / prefix.path(parent, keys[at], s)) for s in spec.shards
        )

    return bisect.bisect_left(range(len(keys)), True, key=lambda at: not there(at))  # noqa: FBT003


def _continuations(directory: Path, parent: bytes) -> int:
    """Count the blocks that follow the last one that matched."""
    try:
        names = os.listdir(directory / parent.hex())
    except OSError:
        return 0
    found = (prefix.parse(name) for name in names)
    return len({one.key for one in found if one is not None and not one.temporary})


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("namespace", found["namespace"]),
        (
            "matched",
            f"{found['blocks']} of {found['of_blocks']} blocks of {found['block_tokens']} tokens",
        ),
        ("tokens", f"{found['tokens']} of {found['of_tokens']}"),
    ]
    if found["bytes"] is None:
        rows.append(("bytes", f"unknown: {_why_unknown(Path(found['namespace']))}"))
    else:
        where = {"ram": "in memory", "nvme": "on nvme"}
        rows += [(text, human(found["bytes"][tier])) for tier, text in where.items()]
        rows.append(("elsewhere only", f"{human(found['bytes']['s3'])} (s3 or other nodes)"))
    rows.append(("prefix", found["last"]))
    after = found["next"]
    if after is None:
        rows.append(("next", "nothing: all whole blocks are cached"))
    else:
        some = " ".join(map(str, after["tokens"][:FEW]))
        more = " ..." if len(after["tokens"]) > FEW else ""
        rows.append(
            ("next", f"{after['path']} is missing: token {after['first_token']}: {some}{more}")
        )
    rows.append(("continued by", f"{found['continuations']} blocks"))
    return rows


def _why_unknown(directory: Path) -> str:
    """Say why kvfs asked with stat, which tells no tiers."""
    if runtime.kvfs_holding(directory) is None:
        return "the path is not on the mount itself, so kvfs asked with stat"
    if not (directory / matching.NAME).exists():
        return f"it has prefix=off, so kvfs asked with stat: kvfs ns set {directory} prefix=on"
    return f"{matching.NAME} cannot be opened, so kvfs asked with stat"

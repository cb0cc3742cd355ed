"""Offers values for an argument that the user writes in a shell: paths, options, namespaces.

Contract: each function has the form of click's `shell_complete`. It raises nothing: a mount that
does not answer soon has no names to offer. `Bash` joins the words that bash splits at `=`. Not for
the installation of a completion.
"""

import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from kvfs import runtime
from kvfs.control import request_within
from kvfs.errors import KvfsError
from kvfs.parsing import SWITCH, ValueKind

PATIENCE = 0.5  # s: a person waits for it at each TAB
BUCKET = ("s3", "s3_endpoint", "s3_region", "s3_profile")

Items = list[CompletionItem]
Completer = Callable[[click.Context, click.Parameter, str], Items]


def directories(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> Items:
    """Offer directories; the shell lists them."""
    return [CompletionItem(incomplete, type="dir")]


def files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> Items:
    """Offer files and directories; the shell lists them."""
    return [CompletionItem(incomplete, type="file")]


def namespaces(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Offer the names of the only mount, and directories if a path has begun."""
    mounts = [one.path for one in runtime.mounts() if one.fstype == runtime.FSTYPE]
    if os.sep in incomplete or len(mounts) != 1:
        return directories(ctx, param, incomplete)
    try:
        found = request_within(Path(mounts[0]), PATIENCE, "ns_list")["namespaces"]
    except (KvfsError, OSError):
        return directories(ctx, param, incomplete)
    # Users choose the names: a shell gets none that it would have to quote.
    names = [one["name"] for one in found if one["name"] not in {".", "/"}]
    plain = [name for name in names if shlex.quote(name) == name and name.startswith(incomplete)]
    return [CompletionItem(name) for name in plain] or directories(ctx, param, incomplete)


def words(known: Iterable[str]) -> Completer:
    """Return a function that offers these words, except those given already."""
    names = tuple(known)

    def offer(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
        given = ctx.params.get(param.name or "") or ()
        return [
            CompletionItem(name)
            for name in names
            if name.startswith(incomplete) and name not in given
        ]

    return offer


def assignments(kinds: Mapping[str, ValueKind]) -> Completer:
    """Return a function for NAME=VALUE arguments: it offers `NAME=`, then words of its value."""

    def offer(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
        given = {word.partition("=")[0] for word in ctx.params.get(param.name or "") or ()}
        return [CompletionItem(text) for text in _assigned(kinds, incomplete, given)]

    return offer


def options(kinds: Mapping[str, ValueKind], flags: Iterable[str] = ()) -> Completer:
    """Return a function for `-o NAME=VALUE,FLAG,...`: it completes the part behind the comma."""
    alone = tuple(flags)

    def offer(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> Items:
        before, comma, last = incomplete.rpartition(",")
        given = {word.partition("=")[0] for word in before.split(",")}
        found = _assigned(kinds, last, given)
        found += [flag for flag in alone if flag.startswith(last) and flag not in given]
        return [CompletionItem(before + comma + text) for text in found]

    return offer


def _assigned(kinds: Mapping[str, ValueKind], incomplete: str, given: set[str]) -> list[str]:
    name, equals, text = incomplete.partition("=")
    if not equals:
        return [f"{one}=" for one in kinds if one.startswith(name) and one not in given]
    kind = kinds.get(name)
    values = () if kind is None else ("on", "off") if kind is SWITCH else kind.words
    return [f"{name}={value}" for value in values if value.startswith(text)]


class Bash(BashComplete):
    """Completion in bash, which makes three words of `NAME=VALUE`, and completes the last one."""

    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)", "[[ $value == *= ]] && compopt -o nospace; COMPREPLY+=($value)"
    )
    _before = ""  # of the whole word, the part that bash does not replace

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor and the one at it, as the user wrote them."""
        args, incomplete = super().get_completion_args()
        joined: list[str] = []
        for word in [*args, incomplete]:
            follows = joined and joined[-1].endswith("=")
            if joined and (word == "=" or follows):
                joined[-1] += word
            else:
                joined.append(word)
        whole = joined.pop()
        self._before = whole.removesuffix("" if incomplete == "=" else incomplete)
        return joined, whole

    def format_completion(self, item: CompletionItem) -> str:
        """Return an item without the part that stays."""
        return f"{item.type},{item.value.removeprefix(self._before)}"


add_completion_class(Bash)

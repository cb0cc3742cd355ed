r"""Manual pages for man(1), made from the help of the commands.

Contract: `pages` gives the text of each page by its file name, `kvfs.1` and one page for each
command; a group such as `kvfs ns` has its commands as sections of its page. The source is the help
alone, so a page cannot say anything else. The format is that of man(7): a line of text never begins
with a dot or a quote, and a backslash is `\e`.
"""

import inspect
from collections.abc import Iterator

import click

from kvfs import __version__

_MOUNT_HELPER = "mount.kvfs.8"


def pages(main: click.Group) -> dict[str, str]:
    """Return the pages by file name. mount.kvfs has the page of `kvfs mount`."""
    top = click.Context(main, info_name="kvfs", **main.context_settings)
    found = {"kvfs.1": _page(top)}
    for name in main.list_commands(top):
        found[f"kvfs-{name}.1"] = _page(_below(top, name))
    return found | {_MOUNT_HELPER: ".so man1/kvfs-mount.1\n"}


def _below(context: click.Context, name: str) -> click.Context:
    command = _group(context).get_command(context, name)
    if command is None:
        raise LookupError(f"{context.command_path} lists {name}, and has no such command")
    return click.Context(command, info_name=name, parent=context)


def _group(context: click.Context) -> click.Group:
    if not isinstance(context.command, click.Group):
        raise TypeError(f"{context.command_path} is no group of commands")
    return context.command


def _page(context: click.Context) -> str:
    name = context.command_path.replace(" ", "-")
    lines = [
        f'.TH "{name.upper()}" 1 "" "kvfs {__version__}" "kvfs"',
        ".SH NAME",
        _text(f"{name} - {context.command.get_short_help_str(limit=200).rstrip('.')}"),
        ".SH SYNOPSIS",
        *_synopsis(context),
        ".SH DESCRIPTION",
        *_described(context),
    ]
    if options := list(_options(context)):
        lines += [".SH OPTIONS", *options]
    if isinstance(context.command, click.Group):
        lines += [".SH COMMANDS", *_commands(context)]
    return "\n".join([*lines, *_last(context)]) + "\n"


def _synopsis(context: click.Context) -> list[str]:
    usage = " ".join(context.command.collect_usage_pieces(context))
    return [f".B {_text(context.command_path)}", _text(usage)]


def _described(context: click.Context) -> Iterator[str]:
    """Paragraphs of the help."""
    yield from _paragraphs(inspect.cleandoc(context.command.help or ""))


def _paragraphs(text: str) -> Iterator[str]:
    r"""Paragraphs; one that `\b` begins keeps its lines, as in the help."""
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield ".PP"
        if paragraph.startswith("\b\n"):
            yield ".nf"
            yield from map(_text, paragraph.splitlines()[1:])
            yield ".fi"
        else:
            yield _text(" ".join(paragraph.split()))


def _options(context: click.Context) -> Iterator[str]:
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if record and record[1]:  # arguments have no help of their own
            yield ".TP"
            yield f".B {_text(record[0])}"
            yield _text(record[1])


def _commands(context: click.Context) -> Iterator[str]:
    """The commands of `kvfs` have pages of their own; those of a group below have sections here."""
    for name in _group(context).list_commands(context):
        one = _below(context, name)
        if context.parent is None:
            yield ".TP"
            yield f".BR kvfs-{_text(name)} (1)"
            yield _text(one.command.get_short_help_str(limit=200))
        else:
            yield f'.SS "{_text(one.command_path)}"'
            yield from _synopsis(one)
            yield ".PP"
            yield from _described(one)
            yield from _options(one)


def _last(context: click.Context) -> Iterator[str]:
    if context.command.epilog:
        yield ".SH NOTES"
        yield from _paragraphs(inspect.cleandoc(context.command.epilog))
    yield ".SH EXIT STATUS"
    yield "0: done. 1: the command failed. 2: the caller made a mistake, and nothing was changed."
    if context.parent is not None:
        yield ".SH SEE ALSO"
        yield ".BR kvfs (1)"


def _text(text: str) -> str:
    r"""Escape a line: `\` and `-` as themselves, and no request at its beginning."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped

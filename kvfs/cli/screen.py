"""Prints tables and progress for a person, or for the program behind a pipe."""

from collections.abc import Container, Iterable

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from kvfs.cli import printable

PIPE_COLUMNS = 240  # a pipe has no width, and grep needs whole lines


def screen() -> Console:
    """Return the console for tables: as wide as the terminal, or wide enough."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and their values."""
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(line, row))
    return table


def table(
    columns: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    left: Container[str] = (),
    fold: Container[str] = (),
) -> Table:
    """Return a table whose numbers end in one column; `left` and `fold` are columns of texts."""
    made = Table(box=None, header_style="bold")
    for name in columns:
        if name in fold:
            made.add_column(name, overflow="fold")
        else:
            made.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        made.add_row(*map(line, row))
    return made


def line(text: str) -> Text:
    """Return a text that keeps to its line and is no markup, even if its names look like it."""
    return Text(printable(text))


def duration(seconds: float) -> str:
    """Return a time as a person reads it: 2 d 03:04:05."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days} d {hour:02}:{minute:02}:{second:02}"


def _bar(*columns: ProgressColumn) -> Progress:
    """Return a bar on stderr, which it clears at its end; a file or pipe gets nothing."""
    console = Console(stderr=True)
    return Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,  # it would lead to stderr
        disable=not console.is_terminal,
    )


def progress() -> Progress:
    """Return a bar that counts."""
    description = TextColumn("{task.description}")
    return _bar(description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def moving(what: str) -> Progress:
    """Return a bar for bytes that move, with a description behind them."""
    return _bar(
        *(TextColumn(what), BarColumn(), DownloadColumn(binary_units=True)),
        *(TextColumn("{task.description}"), TimeRemainingColumn()),
    )


def counting(what: str = "files") -> Progress:
    """Return a bar that counts without a known end."""
    counted = TextColumn(f"{{task.description}}: {{task.completed}} {what}")
    return _bar(SpinnerColumn(), counted, TimeElapsedColumn())

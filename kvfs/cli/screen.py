"""How tables and progress reach a person, or the program behind a pipe."""

from collections.abc import Iterable

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from kvfs.cli import printable

PIPE_COLUMNS = 240  # a pipe has no width, and a line broken in two is of no use to grep


def screen() -> Console:
    """Return where tables are printed: as wide as the terminal, or wide enough."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and what they stand for."""
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(line, row))
    return table


def line(text: str) -> Text:
    """Return a text that is no markup, though names may look like it, and leaves its line alone."""
    return Text(printable(text))


def duration(seconds: float) -> str:
    """Return a time as a person reads it: 2 d 03:04:05."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days} d {hour:02}:{minute:02}:{second:02}"


def progress() -> Progress:
    """Return a bar on stderr that counts, and is gone at its end; nothing in a file or a pipe."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # it would lead to stderr
        disable=not console.is_terminal,
    )


def moving(what: str) -> Progress:
    """The same for bytes that move, with a description behind them."""
    console = Console(stderr=True)
    return Progress(
        *(TextColumn(what), BarColumn(), DownloadColumn(binary_units=True)),
        *(TextColumn("{task.description}"), TimeRemainingColumn()),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def counting(what: str = "files") -> Progress:
    """The same for what has no known end: it counts."""
    console = Console(stderr=True)
    return Progress(
        *(SpinnerColumn(), TextColumn(f"{{task.description}}: {{task.completed}} {what}")),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        disable=not console.is_terminal,
    )

"""How tables and progress reach a person, or the program behind a pipe."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PIPE_COLUMNS = 240  # a pipe has no width, and a line broken in two is of no use to grep


def screen() -> Console:
    """Return where tables are printed: as wide as the terminal, or wide enough."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console


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

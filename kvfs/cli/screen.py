"""How tables reach a person, or the program behind a pipe."""

from rich.console import Console

PIPE_COLUMNS = 240  # a pipe has no width, and a line broken in two is of no use to grep


def screen() -> Console:
    """Return where tables are printed: as wide as the terminal, or wide enough."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console

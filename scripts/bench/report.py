"""The report of a benchmark: the machine, tables, bars, and all of it as JSON on request."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 110)
WHOLE = 100  # from here on figures have no fraction


def _field(path: str, name: str) -> str:
    """The value of the first `name : value` line of a file of /proc."""
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _chosen(path: str) -> str:
    try:
        words = Path(path).read_text().split()
    except OSError:
        return "not there"
    return next((word.strip("[]") for word in words if word.startswith("[")), "unknown")


def machine() -> dict[str, Any]:
    """Return the facts of the machine, on which figures depend more than ratios."""
    return {
        "kernel": platform.release(),
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": int(_field("/proc/meminfo", "MemTotal").split()[0]) * 1024,
        "load_at_start": os.getloadavg()[0],
        "shmem_huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "python": platform.python_version(),
        "root": os.geteuid() == 0,
    }


class Report:
    """Collects what a run found; prints it and writes it."""

    def __init__(self, benchmark: str, **settings: object) -> None:
        self.machine = machine()
        self.document: dict[str, Any] = {
            "benchmark": benchmark,
            "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", f"scripts.bench.{benchmark}", *sys.argv[1:]]),
            "machine": self.machine,
            "settings": settings,
        }
        memory = self.machine["memory_bytes"] / 2**30
        console.print(
            f"[bold]{benchmark}[/bold]: Linux {self.machine['kernel']}, "
            f"{self.machine['cpus']} x {self.machine['cpu']}, {memory:.0f} GiB, "
            f"load {self.machine['load_at_start']:.1f}; "
            + ", ".join(f"{name} {value}" for name, value in settings.items())
        )

    def table(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = ""
    ) -> None:
        table = Table(title=title, title_justify="left", caption=note or None)
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)

    def bars(self, judged: list[dict[str, Any]]) -> None:
        self.document["bars"] = judged
        self.table(
            "Bars",
            ["bar", "at", "bound", "found", "holds", "paired"],
            [
                [
                    bar["bar"],
                    bar["at"],
                    bar["bound"],
                    number(bar["value"]),
                    bar["holds"],
                    number(bar["paired"]),
                ]
                for bar in judged
            ],
        )

    def write(self, path: Path | None) -> None:
        if path is not None:
            path.write_text(json.dumps(self.document, indent=1) + "\n")
            console.print(f"written: {path}")


def number(value: float | None) -> str:
    """Three significant figures, without exponents."""
    if value is None:
        return "-"
    if abs(value) >= WHOLE:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def note(text: str) -> None:
    """One line on what goes on."""
    console.print(text, style="dim", highlight=False)

"""Pictures of the tables in docs/benchmarks.md, as docs/images/bench-*.svg.

    .venv/bin/python -m scripts.plots      after a table has changed

Contract: every number comes from the document, so that picture and table cannot differ; each
picture carries the digest of the table that it shows, and a test compares them. Not for measuring.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
# By the order of series; told apart also without colours, by lightness.
COLOURS = ("#0b3c5d", "#d9730d", "#7fb7be", "#a3a3a3", "#5c8a3a", "#c8b6a6")


class Table(NamedTuple):
    """`rows` by column; all cells are text."""

    columns: list[str]
    rows: list[dict[str, str]]
    digest: str


def table(heading: str) -> Table:
    """The first table below a heading. Raises ValueError if there is none."""
    section = DOCUMENT.read_text().partition(f"\n## {heading}")[2]
    found = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"{DOCUMENT.name} has no table below {heading!r}")
    lines = [
        [cell.strip(" *") for cell in line.strip("|").split("|")] for line in found[0].splitlines()
    ]
    rows = [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]
    return Table(lines[0], rows, hashlib.sha256(found[0].encode()).hexdigest()[:16])


def number(cell: str) -> float:
    """Not measured is 0, which makes no bar."""
    return 0.0 if cell == "-" else float(cell.replace(",", ""))


def _bars(axes: Axes, groups: list[str], series: dict[str, list[float]], unit: str) -> None:
    width = 0.8 / len(series)
    for place, (name, values) in enumerate(series.items()):
        at = [group + (place - (len(series) - 1) / 2) * width for group in range(len(groups))]
        axes.bar(at, values, width, label=name, color=COLOURS[place])
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(unit)
    axes.spines[["top", "right"]].set_visible(False)


def bandwidth(figure: Figure, found: Table) -> None:
    """Reads and writes by size: what the mount makes of its tiers."""
    for place, (what, tiers) in enumerate(
        [
            ("write", ["tmpfs", "ram", "shm", "daemon", "nvme direct", "nvme"]),
            ("warm", ["tmpfs", "ram", "shm", "daemon", "nvme direct", "nvme"]),
        ]
    ):
        rows = [row for row in found.rows if row[""] == what]
        axes = figure.add_subplot(2, 1, place + 1, title="read" if what == "warm" else what)
        series = {tier: [number(row[tier]) for row in rows] for tier in tiers}
        _bars(axes, [row["size"] for row in rows], series, "GB/s")
        if place == 0:
            axes.legend(ncols=6, fontsize=8, frameon=False, loc="upper left")
            axes.set_ylim(0, 38)


def operations(figure: Figure, found: Table) -> None:
    """The same operations with a thousand objects and with a million."""
    rows = [row for row in found.rows if row["clients"] == "1"]
    axes = figure.add_subplot(title="operations a second, one client")
    columns = ["with 10^3 objects", "with 10^6"]
    series = {name: [number(row[name]) for row in rows] for name in columns}
    _bars(axes, [row["operation"].replace(" ", "\n") for row in rows], series, "")
    axes.set_yscale("log")
    axes.legend(frameon=False)


def bucket(figure: Figure, found: Table) -> None:
    """Plot downloads from a bucket and uploads to it, beside other clients."""
    axes = figure.add_subplot(title="to and from a bucket")
    names = ["boto3", "kvfs", "s3fs", "rclone"]
    series = {name: [number(row[name]) for row in found.rows] for name in names}
    _bars(axes, [f"{row['objects']}\n{row['']}" for row in found.rows], series, "MB/s")
    axes.legend(frameon=False, ncols=4)


def ttft(figure: Figure, found: Table) -> None:
    """A prefix recomputed and loaded, by its length."""
    axes = figure.add_subplot(title="seconds to the first token")
    lengths = [number(row["prefix"]) for row in found.rows]
    for place, name in enumerate(["recompute", "load"]):
        values = [number(row[name]) for row in found.rows]
        axes.plot(lengths, values, marker="o", label=name, color=COLOURS[place])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [row["prefix"] for row in found.rows])
    axes.set_xlabel("tokens of the prefix")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def prefixes(figure: Figure, found: Table) -> None:
    """Plot saves and loads of tensors, as engines see them, beside other ways to keep them."""
    names = {"raw, mount": "one call a file", "kvfs, mount": "kvfs.client"}
    names |= {
        "VUA, mount": "VUA's design",
        "torch, mount": "torch",
        "safetensors, mount": "safetensors",
    }
    rows = {row["GB/s"]: row for row in found.rows}
    groups = [column for column in found.columns if column != "GB/s" and "first" not in column]
    series = {shown: [number(rows[way][at]) for at in groups] for way, shown in names.items()}
    axes = figure.add_subplot(title="a prefix of 64 blocks, on the mount")
    _bars(axes, [group.replace(" ", "\n") for group in groups], series, "GB/s")
    axes.legend(frameon=False, ncols=5, fontsize=8)


PICTURES: dict[str, tuple[str, Callable[[Figure, Table], None]]] = {
    "bandwidth": ("Bandwidth", bandwidth),
    "operations": ("Operations", operations),
    "bucket": ("A bucket", bucket),
    "prefixes": ("Prefixes", prefixes),
    "ttft": ("Time to the first token", ttft),
}


def draw(name: str) -> Path:
    """Write one picture."""
    heading, paint = PICTURES[name]
    found = table(heading)
    figure = Figure(figsize=(9, 6 if name == "bandwidth" else 4), layout="constrained")
    paint(figure, found)
    path = IMAGES / f"bench-{name}.svg"
    path.parent.mkdir(exist_ok=True)
    about: dict[str, Any] = {"Date": None, "Source": f"docs/benchmarks.md {found.digest}"}
    figure.savefig(path, format="svg", metadata=about)
    return path


def main() -> None:
    """Draw all of them anew."""
    mpl.rcParams["svg.hashsalt"] = "kvfs"  # the same table gives the same file
    for name in PICTURES:
        print(draw(name).relative_to(ROOT))


if __name__ == "__main__":
    main()

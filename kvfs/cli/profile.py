"""`kvfs profile`: evaluate an access log of a mount, and recommend the size of the mount."""

from itertools import islice
from pathlib import Path
from typing import Any

import click

from kvfs.cli import give, human, json_option
from kvfs.cli.screen import counting, line, pairs, screen, table
from kvfs.errors import ConfigError
from kvfs.simulation.accesses import Profile, read

STEP = 1000  # lines between two looks at the bar


@click.command
@click.argument("log", metavar="LOG", type=click.Path(path_type=Path))
@click.option("--limit", type=click.IntRange(min=1), help="Read the first N lines only.")
@json_option
def command(log: Path, *, limit: int | None, as_json: bool) -> None:
    """Summarize an access LOG, and propose sizes.

    `kvfs set MOUNTPOINT access_log=LOG` starts a log, `access_log=none` ends it. The command also
    reads LOG.1, the older half.
    """
    found, profile = 0, Profile()
    with counting("lines") as bar:
        task = bar.add_task("reading", total=None)
        for found, access in enumerate(islice(read(log), limit), 1):
            profile.add(access)
            if found % STEP == 0:
                bar.update(task, completed=found)
    if not found:
        raise ConfigError(f"{log}: the access log is empty: use the mount, then try again")
    give(profile.describe(), _show, as_json=as_json)


def _show(found: dict[str, Any]) -> None:
    console = screen()
    reads = (
        f"{found['reads']}, {found['reads_per_s']:.1f}/s, {human(int(found['read_bytes_per_s']))}/s"
    )
    writes = f"{found['writes']}, {found['writes_per_s']:.1f}/s"
    facts = [
        ("time", f"{found['seconds']:.1f} s"),
        ("reads", f"{reads}; {found['most_reads_in_a_second']} in the busiest second"),
        ("writes", f"{writes}, {human(int(found['write_bytes_per_s']))}/s"),
        ("misses", f"{found['misses']}; hit ratio {found['hit_ratio']:.1%}"),
        ("objects", f"{found['objects']}, {human(found['object_bytes'])}"),
        ("sizes written", _spread(found["written_sizes"])),
        ("read from", ", ".join(f"{t} {s:.1%}" for t, s in found["read_from"].items()) or "-"),
        ("read again", f"{found['reused']:.1%} of the reads"),
        ("reuse distance", _spread(found["reuse_distance_bytes"])),
        (
            "reuse after",
            ", ".join(f"{n} {v:.1f} s" for n, v in found["reuse_after_s"].items()) or "-",
        ),
    ]
    if found["lost_lines"]:
        facts.append(("not noted", f"{found['lost_lines']} accesses: the disk of the log is slow"))
    spaces = (
        [
            *(name, str(one["reads"]), str(one["misses"]), f"{one['hit_ratio']:.1%}"),
            *(human(one["read_bytes"]), human(one["write_bytes"]), str(one["dropped"])),
        ]
        for name, one in found["namespaces"].items()
    )
    columns = ("namespace", "reads", "misses", "hit ratio", "read", "written", "dropped")
    console.print(pairs(facts), table(columns, spaces, fold=("namespace",)))
    paths = ([one["path"], str(one["reads"]), str(one["objects"])] for one in found["prefixes"])
    console.print(
        table(("busiest prefixes", "reads", "objects"), paths, fold=("busiest prefixes",))
    )
    for one in found["sizes_for"]:
        size = human(one["bytes"])
        console.print(line(f"{size} hold {one['share']:.0%} of what was read again (LRU)"))


def _spread(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {human(int(value))}" for name, value in values.items()) or "-"

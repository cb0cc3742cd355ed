"""`kvfs evict`: have files and trees leave memory, or all local tiers, now."""

import json
from typing import Any

import click

from kvfs.cli import human, json_option
from kvfs.cli.jobs import follow, start
from kvfs.errors import ConfigError, KvfsError


@click.command
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--to",
    type=click.Choice(["nvme", "s3"]),
    help="The tier that they go to: nvme leaves memory (the default where there is an NVMe tier), "
    "s3 every local tier.",
)
@click.option("--drop", is_flag=True, help="Leave every local tier, and lose what only is here.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def command(
    paths: tuple[str, ...], *, to: str | None, drop: bool, dry_run: bool, as_json: bool
) -> None:
    """Have files and all below directories PATH... leave their faster tiers now.

    What nothing else has is copied to NVMe first, or refused; nothing is lost without --drop. What
    is open, pinned or never dropped stays. The exit code is 1 if anything was refused.
    """
    if drop and to == "nvme":
        raise ConfigError("--to nvme loses nothing: --drop goes with --to s3, or alone")
    found = follow(start(paths, "evict", to=to or "", drop=drop, dry=dry_run), "evicting")
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(_summary(found, dry=dry_run))
    if found["refused"]:
        reasons = sorted(found["why"].items(), key=lambda item: -item[1])
        why = ", ".join(f"{why} ({count})" for why, count in reasons)
        raise KvfsError(f"{found['refused']} of {found['files']} files stay: {why}")


def _summary(found: dict[str, Any], *, dry: bool) -> str:
    files, dropped, to = found["files"], found["dropped"], found["to"]
    went, lost, free = ("would go", "would be", "would be") if dry else ("have gone", "are", "are")
    parts = [f"{found['evicted']} of {files} files {went} to {to}"]
    if dropped and found["evicted"]:
        parts.append(f"{dropped} {lost} dropped")
    elif dropped:
        parts = [f"{dropped} of {files} files {lost} dropped"]
    where = "in memory" if to == "nvme" else "in local tiers"
    return f"{', '.join(parts)}; {human(found['freed_bytes'])} {free} free {where}"

"""`kvfs fsck`: find defects of a kvfs, mounted or not, and repair them.

The daemon checks a mounted kvfs, beside its operations. This process checks one that is not
mounted, and holds its NVMe directory meanwhile. Exit codes are those of fsck(8), except for a fault
of the caller, which is 2 for all commands of kvfs.
"""

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvfs.cli import Refusal, completion, is_mount, json_option, printable, target_argument
from kvfs.cli.jobs import JobProgress, polled
from kvfs.cli.screen import progress
from kvfs.config import OPTIONS, bucket_place
from kvfs.control import request
from kvfs.errors import ConfigError, ControlError, InUseError, KvfsError, UsageError

CLEAN, REPAIRED, LEFT, FAILED = 0, 1, 4, 8  # fsck(8)
NOTES = {
    "to_verify": "copies are older than a power loss: verify them (--hashes)",
    "verified": "copies match their digest",
    "without_digest": "copies have no digest to compare with",
    "ram_gone": "objects were only in RAM, which is gone: the next mount drops them",
    "unfinished": "objects were open when the daemon died: the next mount handles them",
    "in_bucket": "objects are in the bucket as the catalog says",
    "deletes_done": "objects to delete from the bucket are gone already (--repair records it)",
    "quarantined": "files are in quarantine: look at them, then delete them",
}


class CheckFailed(Refusal):
    """The check did not start, or did not reach its end."""

    exit_code = FAILED


@click.command
@target_argument
@click.option(
    "--repair",
    is_flag=True,
    help="Repair the findings. Without --repair the check changes nothing.",
)
@click.option("--hashes", is_flag=True, help="Read all copies and compare their digests.")
@click.option("--bucket", is_flag=True, help="Compare the catalog with a listing of the bucket.")
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="s3_endpoint=...,...",
    help=(
        "Bucket of an unmounted kvfs: s3, s3_endpoint (default: Amazon's), s3_region, "
        "s3_profile, and s3_shared=off if no other node uses it."
    ),
    shell_complete=completion.options(
        {name: OPTIONS[name] for name in (*completion.BUCKET, "s3_shared")}
    ),
)
@json_option
def command(
    target: Path,
    *,
    repair: bool,
    hashes: bool,
    bucket: bool,
    options: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check catalog and tiers for damage, and --repair it.

    TARGET is a mount point, or the NVMe directory of an unmounted kvfs.

    Exit codes: 0 no damage; 1 all damage repaired; 4 damage left; 8 the check failed; 2 wrong
    usage.
    """
    live = is_mount(target)
    if live and options:
        raise ConfigError(f"{target} is mounted, and knows its bucket: leave -o out")
    bucket_place(",".join(options))  # a wrong option is the caller's fault
    how = {"repair": repair, "hashes": hashes}
    if bucket:  # a daemon of an older version does not know it
        how["bucket"] = True
    shown = _Report(target, quiet=as_json)
    try:
        with shown.bar:
            if live:
                _ask_daemon(target, shown.add_answer, how)
            else:
                from kvfs import fsck  # noqa: PLC0415 - a mounted kvfs is checked by its daemon

                # The findings have all that its layers would log.
                logging.getLogger("kvfs").addHandler(logging.NullHandler())
                fsck.run(target, shown.add_answer, options=",".join(options), **how)
    except InUseError as error:
        raise UsageError(
            f"{target} is in use ({error.holder}): check the mount instead, "
            f"kvfs fsck {_mountpoint(error.holder)}"
        ) from error
    except UsageError:
        raise
    except KvfsError as error:
        raise CheckFailed(str(error)) from error
    if as_json:
        mode = "live" if live else "offline"
        click.echo(json.dumps({"target": str(target), "mode": mode, **shown.as_json()}))
    else:
        shown.sum_up()
    sys.exit(shown.exit_code)


def _mountpoint(holder: str) -> str:
    return holder.partition("mounted on ")[2] or "MOUNTPOINT"


def _ask_daemon(
    mountpoint: Path, tell: Callable[[JobProgress], None], how: dict[str, bool]
) -> None:
    try:
        request(mountpoint, "check", **how)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    for answer in polled(lambda: request(mountpoint, "checked")):
        tell(answer)
        if answer["failed"]:
            raise ControlError(f"the check of {mountpoint} ended: {answer['failed']}")


class _Report:
    """Shows the findings as they come; `quiet` keeps them for one JSON document."""

    def __init__(self, target: Path, *, quiet: bool) -> None:
        self.bar = progress()
        self._task = self.bar.add_task("")
        self._target = target
        self._quiet = quiet
        self._findings: list[dict[str, Any]] = []
        self._states = Counter[str]()
        self._last: JobProgress = {}

    def add_answer(self, answer: JobProgress) -> None:
        for finding in answer["findings"]:
            self._states[finding["state"]] += 1
            if self._quiet:
                self._findings.append(finding)
            else:
                self._print(_line(finding))
        self._last = answer
        self.bar.update(
            self._task,
            description=f"checking {answer['phase']}",
            completed=answer["done"],
            total=max(answer["done"], answer["total"]) if answer["total"] else None,
        )

    def _print(self, line: str) -> None:
        """Print a line above the bar, if both are on the same screen."""
        if self.bar.disable or not sys.stdout.isatty():
            click.echo(line)
        else:
            self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @property
    def exit_code(self) -> int:
        if self._states["found"] or self._states["left"]:
            return LEFT
        return REPAIRED if self._states["repaired"] else CLEAN

    def as_json(self) -> dict[str, Any]:
        return {
            "inodes": self._last["inodes"],
            "findings": self._findings,
            "notes": self._last["notes"],
            "exit": self.exit_code,
        }

    def sum_up(self) -> None:
        notes = self._last["notes"]
        for name, meaning in NOTES.items():
            if name in notes:
                click.echo(f"note: {notes[name]} {meaning}")
        found, states = sum(self._states.values()), self._states
        click.echo(
            f"{printable(self._target)}: {self._last['inodes']} inodes and "
            f"{notes.get('copies', 0)} copies are in order"
            if not found
            else f"{printable(self._target)}: {found} findings in "
            f"{self._last['inodes']} inodes, {states['repaired']} repaired, "
            f"{found - states['repaired']} left"
        )


def _line(finding: dict[str, Any]) -> str:
    done = {"found": "--repair", "repaired": "repaired", "left": "left"}[finding["state"]]
    about = f"inode {finding['ino']}" if finding["ino"] else "-"
    path = f" {finding['path']}" if finding["path"] else ""
    return f"{finding['kind']}: {about}{path}: {finding['what']} ({done}: {finding['cure']})"

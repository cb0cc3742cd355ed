"""`kvfs doctor`: can this machine run kvfs at full speed, and what would cure it if not?

Works without a mount and changes nothing that lasts. The doctor tries each feature in a mount
namespace of its own, because configuration files do not prove how the kernel behaves.
"""

import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import click
from rich.table import Table
from rich.text import Text

import kvfs
from kvfs import runtime
from kvfs.cli import completion, give, human, json_option, printable
from kvfs.cli.screen import screen
from kvfs.errors import ConfigError
from kvfs.pool.nginx import EXTRA, installed

KERNEL = (6, 9)
LIBFUSE = (3, 14)
LIBFUSE_NAMES = ("libfuse3.so.4", "libfuse3.so.3")
CAP_SYS_ADMIN = 21
SMALL_MEMORY = 1 << 30
PROBE_TIMEOUT_S = 20

Verdict = Literal["ok", "degraded", "missing"]
STYLES = {"ok": "green", "degraded": "yellow", "missing": "red"}


class Check(NamedTuple):
    """One check and its result. `degraded` still mounts, slower; `missing` does not mount."""

    name: str
    verdict: Verdict
    found: str
    cure: str = ""


def _file(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Path | None:
    if value == "":  # an unset variable in a script; it would mean the current directory
        raise click.BadParameter("the path is empty: expected the path of a new file")
    return None if value is None else Path(value)


@click.command
@json_option
@click.option(
    "--bundle",
    callback=_file,
    shell_complete=completion.files,
    metavar="FILE.tar.gz",
    help=("Write the report, and all other facts that a defect report needs, to a new file."),
)
@click.option(
    "--names", is_flag=True, help="Do not mask names of objects and namespaces in the bundle."
)
@click.option("--no-fsck", is_flag=True, help="Do not run a check of the mounts for the bundle.")
def command(*, as_json: bool, bundle: Path | None, names: bool, no_fsck: bool) -> None:
    """Check whether this machine can run kvfs.

    The exit code is 0 for full speed, 1 if kvfs cannot run or is slower. With --bundle it is 0 if
    the file is written. The bundle contains no secrets; look at it before you send it.
    """
    if (names or no_fsck) and bundle is None:
        raise ConfigError("--names and --no-fsck need --bundle FILE")
    checks = list(_checks())
    rows = [check._asdict() for check in checks]
    if bundle is not None:
        from kvfs.cli.bundle import write  # noqa: PLC0415 - the doctor alone needs none of it

        found = write(bundle, rows, names=names, fsck=not no_fsck)
        written = f"{printable(bundle)}: {len(found)} files"
        click.echo(f"{written}; look at them before you send it")
        return
    well = all(check.verdict == "ok" for check in checks)
    give({"ok": well, "checks": rows}, lambda _: _show(checks), as_json=as_json)
    raise SystemExit(0 if well else 1)


def _checks() -> Iterator[Check]:
    privileged = _privileged()
    yield _kernel()
    yield _device()
    yield _libfuse()
    yield _privileges(privileged=privileged)
    yield _fusermount(privileged=privileged)
    yield from _tried(privileged=privileged)
    yield _memory()
    yield _packages()
    yield _extension()
    yield _pool()


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _kernel() -> Check:
    release = platform.release()
    if _version(release) >= KERNEL:
        return Check("kernel", "ok", f"Linux {release}")
    cure = "boot Linux 6.9 or newer for passthrough"
    return Check("kernel", "degraded", f"Linux {release}", cure)


def _device() -> Check:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        cure = "modprobe fuse; in a container pass --device /dev/fuse"
        if isinstance(error, PermissionError):
            cure = "use sudo; for all users: apt-get install fuse3, whose udev rule sets the mode"
        return Check("/dev/fuse", "missing", error.strerror or str(error), cure)
    return Check("/dev/fuse", "ok", "opens")


def _libfuse() -> Check:
    bundled = Path(kvfs.__file__).parent.parent / "kvfs.libs"  # auditwheel puts it there
    for name in (*map(str, bundled.glob("libfuse3-*.so*")), *LIBFUSE_NAMES):
        with contextlib.suppress(OSError):
            describe = ctypes.CDLL(name).fuse_pkgversion
            describe.restype = ctypes.c_char_p
            version = describe().decode()
            if _version(version) >= LIBFUSE:
                return Check("libfuse", "ok", version)
            cure = "Debian 12, Ubuntu 24.04 and newer have 3.14"
            return Check("libfuse", "missing", version, cure)
    return Check("libfuse", "missing", "not installed", "apt-get install libfuse3-dev fuse3")


def _privileged() -> bool:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(found and int(found[1], 16) >> CAP_SYS_ADMIN & 1)


def _privileges(*, privileged: bool) -> Check:
    if privileged:
        return Check("privileges", "ok", "CAP_SYS_ADMIN")
    cure = "run as root; in a container pass --cap-add SYS_ADMIN"
    return Check("privileges", "degraded", f"uid {os.geteuid()} without CAP_SYS_ADMIN", cure)


def _fusermount(*, privileged: bool) -> Check:
    if path := shutil.which("fusermount3"):
        return Check("fusermount3", "ok", path)
    if privileged:
        return Check("fusermount3", "ok", "not installed; only needed without CAP_SYS_ADMIN")
    return Check("fusermount3", "missing", "not installed", "apt-get install fuse3")


def _tried(*, privileged: bool) -> Iterator[Check]:
    """Try passthrough and huge pages for real."""
    cures = {
        "passthrough": "Linux 6.9 with CONFIG_FUSE_PASSTHROUGH, and CAP_SYS_ADMIN on the host",
        "huge_pages": f"echo advise > {_SHMEM_ENABLED}; a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
    }
    results = _probe() if privileged else dict.fromkeys(cures, "not tried: needs CAP_SYS_ADMIN")
    for name, cure in cures.items():
        reason = results[name]
        if not reason:
            yield Check(name.replace("_", " "), "ok", "tried, works")
        else:
            yield Check(name.replace("_", " "), "degraded", reason, cure)


_SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def _probe() -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="kvfs-probe-") as directory:
        command = ["unshare", "--mount", "--propagation", "private", "--"]
        command += [sys.executable, "-m", "kvfs.cli.probe", directory]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=True,
                timeout=PROBE_TIMEOUT_S,
                cwd="/",
            )
            results: dict[str, str] = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            stderr = getattr(error, "stderr", None) or str(error)
            return dict.fromkeys(("passthrough", "huge_pages"), f"could not try: {stderr.strip()}")
    return results


def _memory() -> Check:
    may, free = runtime.memory(), runtime.available_memory()
    found = f"{human(may)}, {human(free)} available"
    if free < SMALL_MEMORY:
        return Check("memory", "degraded", found, "free some, or raise the cgroup's limit")
    return Check("memory", "ok", found)


def _packages() -> Check:
    found, absent = [], []
    try:
        requirements = importlib.metadata.requires("kvfs") or []
    except importlib.metadata.PackageNotFoundError:
        return Check("python packages", "missing", "kvfs is not installed", "scripts/install.sh")
    for requirement in requirements:
        older = re.search(r'python_version < "(\d+)\.(\d+)"', requirement)
        if "extra ==" in requirement or (
            older and sys.version_info >= (int(older[1]), int(older[2]))
        ):
            continue
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    if absent:
        cure = f"{sys.executable} -m pip install {' '.join(absent)}"
        return Check("python packages", "missing", f"no {', '.join(absent)}", cure)
    return Check("python packages", "ok", ", ".join(found))


def _extension() -> Check:
    try:
        importlib.import_module("kvfs.fuse._passthrough")
    except ImportError as error:
        return Check("C extension", "missing", str(error), "scripts/install.sh")
    return Check("C extension", "ok", "loads")


def _pool() -> Check:
    """Look for what only mounts with the option pool need: its lack degrades nothing else."""
    try:
        nginx = ".".join(map(str, installed().version))
        redis = importlib.metadata.version("redis")
    except importlib.metadata.PackageNotFoundError:
        lacks = f"no Python package redis: {EXTRA}"
    except ConfigError as error:
        lacks = str(error).removeprefix("pool: ")
    else:
        return Check("pool", "ok", f"nginx {nginx}, redis {redis}")
    return Check("pool", "ok", f"{lacks}; only the option pool needs it")


def _show(checks: list[Check]) -> None:
    table = Table(box=None, show_header=False)
    for check in checks:
        verdict = Text(check.verdict, style=STYLES[check.verdict])
        table.add_row(verdict, Text(check.name, style="bold"), Text(check.found))
        if check.cure:
            table.add_row("", "", Text(f"cure: {check.cure}", style="italic"))
    screen().print(table)

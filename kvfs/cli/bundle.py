"""`kvfs doctor --bundle`: one file with all that a report of a defect needs, and no secret.

Contract: the command only reads and changes nothing. If it cannot read a part, the bundle has a
line with the reason. Environment: the variables of ENVIRONMENT, and for CREDENTIALS only whether
they are set. No bytes of objects, no keys of a bucket's account. Names of objects, namespaces and
models are masked (`Masks`) without `names`. Not for judging the findings: `doctor` does that.
"""

import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvfs import __version__, own_files, runtime
from kvfs.cli import kvfs_mounts, unwritten
from kvfs.cli.jobs import polled
from kvfs.config import Config
from kvfs.control import request
from kvfs.errors import ControlError, KvfsError

LOG_BYTES = 256 << 10  # of the end of each log
ENVIRONMENT = (
    *("LANG", "LC_ALL", "PATH", "PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "TZ"),
    *("XDG_RUNTIME_DIR", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED"),
    *("NOTIFY_SOCKET", "container", "INVOCATION_ID"),
)
CREDENTIALS = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"),
    *("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY"),
)
PROC = (
    *("/proc/version", "/proc/meminfo", "/proc/loadavg", "/proc/uptime", "/proc/self/cgroup"),
    *("/proc/pressure/cpu", "/proc/pressure/io", "/proc/pressure/memory", "/proc/swaps"),
    *("/proc/sys/fs/file-nr", "/proc/sys/vm/overcommit_memory", "/proc/filesystems"),
    *("/sys/kernel/mm/transparent_hugepage/enabled", "/etc/os-release"),
    "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
)
OF_PROCESS = ("status", "limits", "stat", "schedstat", "io", "wchan")

MASK = "<masked>"
SECRET_LEAST = 6  # characters; many words contain a shorter one
# Fields of a status whose texts are names of objects, namespaces or models, or come from users.
NAMED = {"name", "path", "model", "fingerprint", "files", "key", "problem", "note"}
_QUOTED = re.compile(r"""b?'[^'\n]*'|b?"[^"\n]*\"""")
_AFTER = re.compile(r"\b((?:namespace|attribute|key)s?) (?!\d+\b)[^\s,:;]+")
_WORD = re.compile(
    r"""[(\[{<]*(
      [A-Za-z][A-Za-z'-]{0,23}                # a word; a longer one may be a token
    | [A-Za-z]+(_[a-z]+)+                     # a setting, a counter
    | [-+]?\d+([.,:/-]\d+)*(%|[A-Za-z]{1,3})? # a number, a size, a time, an address
    | \d{4}-\d\d-\d\dT[\d:.]+Z?
    | kvfs(\.[a-z_0-9]+)+                     # a module
    | [a-z_0-9]+=[-\w.]{0,15}                 # an option
    | [a-z]+(\+[a-z0-9]+)+                   # tiers
    )[)\]}>,.:;!?%]*""",
    re.VERBOSE,
)
_SOURCE = re.compile(r'File "[^"\n]*/(kvfs/[a-z_0-9/]+\.py)"')  # of a traceback
_USER = re.compile(r"(?<=://)[^/\s@]+@")  # and password, in a URL
_SECRET = re.compile(r"(?i)(secret|password|passwd|token|credential|signature|access.?key)")
# Fields whose texts are kvfs's own.
_AS_IT_IS = {"version", "mountpoint", "state", "kind", "level", "source", "eviction", "engine"}

Member = tuple[str, str]  # name in the archive, content


def write(path: Path, checks: list[dict[str, Any]], *, names: bool, fsck: bool) -> list[str]:
    """Write the bundle and return its contents. ConfigError: it exists, or cannot be written."""
    members = [
        ("doctor.json", _json(checks)),
        ("versions.json", _json(_versions())),
        ("environment.json", _json(_environment())),
        *((f"machine{name}", _had(Path(name).read_text)) for name in PROC),
        ("machine/processors.json", _json(_processors())),
    ]
    for number, mount in enumerate(kvfs_mounts(), 1):
        of_mount = _of_mount(Path(mount), names=names, fsck=fsck)
        members += [(f"mount{number}/{name}", text) for name, text in of_mount]
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unwritten(f"--bundle {path}", error) from error
    try:
        _pack(file, members)
    except OSError as error:
        path.unlink(missing_ok=True)  # a part of a report would look like a whole one
        raise unwritten(f"--bundle {path}", error) from error
    return [name for name, _ in members]


def _pack(file: int, members: Iterable[tuple[str, str]]) -> None:
    with os.fdopen(file, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, text in members:
            content = scrub(text, os.environ).encode("utf-8", "backslashreplace")
            entry = tarfile.TarInfo(f"kvfs-bundle/{name}")
            entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(content))


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _had(get: Callable[[], str]) -> str:
    try:
        return get()
    except (OSError, ValueError, KvfsError) as error:
        return f"not available: {error}\n"


def _versions() -> dict[str, str]:
    return {
        "kvfs": __version__,
        "python": sys.version,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
    }


def _environment() -> dict[str, str]:
    found = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return found | {name: "is set" for name in CREDENTIALS if name in os.environ}


def _processors() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.partition(": ")[2] for line in lines if line.startswith("model name")}
    may_use = len(os.sched_getaffinity(0))
    return {"models": sorted(models), "count": os.cpu_count(), "may_use": may_use}


def _of_mount(mountpoint: Path, *, names: bool, fsck: bool) -> Iterator[Member]:
    try:
        status = request(mountpoint, "status")
    except KvfsError as error:
        yield "status.json", f"not available: {error}\n"
        log = runtime.log_path(mountpoint)
        yield "log.txt", Masks(safe=[str(mountpoint)]).text(_had(lambda: _end_of(log)))
        return
    known = [space["name"] for space in status["namespaces"] if space["name"] != "."]
    known += [part for hot in status["hot"] for part in hot["path"].split("/")]
    known += [one["model"] for one in status["models"]]
    safe = [str(mountpoint), *(tier["path"] for tier in status["tiers"].values())]
    masks = None if names else Masks(known, safe)

    def shown(value: object) -> str:
        return _json(masks.value(value) if masks else value)

    yield "config.json", _json(status.pop("options"))
    yield "namespaces.json", shown(status.pop("namespaces"))
    yield "status.json", shown(status)
    yield "events.json", _had(lambda: shown(request(mountpoint, "events")["events"]))
    text = _had(lambda: _end_of(_log_of(mountpoint)))
    yield "log.txt", masks.text(text) if masks else text
    for what, pid in (("daemon", status["daemon_pid"]), ("keeper", status["keeper_pid"])):
        for name in OF_PROCESS:
            path = Path(f"/proc/{pid}/{name}")
            yield f"{what}/{name}", _had(path.read_text)
        yield f"{what}/open_files", _had(partial(_count, Path(f"/proc/{pid}/fd")))
    if fsck:
        yield "fsck.json", _had(lambda: _json(_check(mountpoint)))


def _log_of(mountpoint: Path) -> Path:
    text = own_files.read(
        runtime.runtime_dir(mountpoint) / "config", "the options of the mount", "mount it again"
    )
    return (Config.from_json(text).log if text else None) or runtime.log_path(mountpoint)


def _count(directory: Path) -> str:
    return f"{len(list(directory.iterdir()))}\n"


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        return file.read().decode(errors="replace")


def _check(mountpoint: Path) -> dict[str, Any]:
    """Return the findings of a check by kind, without hashes and without a name."""
    request(mountpoint, "check", repair=False, hashes=False)
    kinds = Counter[str]()
    for answer in polled(lambda: request(mountpoint, "checked")):
        kinds.update(finding["kind"] for finding in answer["findings"])
        if answer["failed"]:
            raise ControlError(answer["failed"])
    return {"findings": kinds, "inodes": answer["inodes"], "notes": answer["notes"]}


def scrub(text: str, environment: Mapping[str, str]) -> str:
    """Return the text without passwords in URLs and the values of variables named as secrets."""
    secrets = [
        value
        for name, value in environment.items()
        if _SECRET.search(name) and len(value) >= SECRET_LEAST
    ]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return _USER.sub(f"{MASK}@", text)


class Masks:
    """Masks all parts of texts for other people's eyes that could be a secret or a file's name.

    `text` keeps the words of each line that are known to be harmless: words, numbers, times, names
    of kvfs's modules and tiers, paths given as `safe`. It puts MASK for everything else: quoted
    text, text in a shape that names and keys have, and the words given as `names`. `text` cannot
    tell a file's name that is a plain word from another word, unless it was given. `value` does the
    same to plain values, by the fields that have names. Not for texts that must stay word for word.
    """

    def __init__(self, names: Iterable[str] = (), safe: Iterable[str] = ()) -> None:
        words = sorted({name for name in names if name}, key=len, reverse=True)
        whole = (rf"(?<!\w){re.escape(word)}(?!\w)" for word in words)
        self._names = re.compile("|".join(whole) or r"(?!)")
        self._safe = sorted({path for path in safe if path}, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return the text with each line masked."""
        return "\n".join(map(self._line, text.split("\n")))

    def _line(self, line: str) -> str:
        line = _SOURCE.sub(r"File \1", line)
        line = _QUOTED.sub(MASK, line)
        line = _AFTER.sub(rf"\1 {MASK}", line)
        line = self._names.sub(MASK, line)
        return re.sub(r"\S+", self._word, line)

    def _word(self, found: re.Match[str]) -> str:
        word = found[0]
        bare = word.strip("()[]{}<>,.:;")
        if word.strip("()[],.:;") == MASK or _WORD.fullmatch(word) or bare in self._safe:
            return word
        if re.fullmatch(r"kvfs/[a-z_0-9/]+\.py,?", word):
            return word
        for path in self._safe:  # a tier's own file: objects/II/INODE.VERSION
            if re.fullmatch(rf"{re.escape(path)}/(objects|quarantine)/[0-9a-f/.]+", bare):
                return word
        return MASK if re.search(r"\w", word) else word

    def value(self, value: Any, field: str = "") -> Any:  # noqa: ANN401 - JSON
        """Return a copy without secrets; texts of fields that have names are masked."""
        if isinstance(value, dict):
            return {name: self.value(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [self.value(one, field) for one in value]
        if isinstance(value, str) and value:
            if _SECRET.search(field) or (field in NAMED and value not in {*self._safe, "."}):
                return MASK
            return value if field in _AS_IT_IS or value in self._safe else self._line(value)
        return value

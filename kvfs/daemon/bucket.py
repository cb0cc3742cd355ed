"""The bucket of a mount, made ready: asked in a process of its own before anything is changed.

Contract: `prepare` raises ConfigError with the reason where a mount is to be refused. A takeover
asks nothing: what the store honours was found out at the mount, and is in the runtime directory.
Not for objects, nor for how the bucket is later (`core/flow/availability.py`).
"""

import json
import logging
import subprocess
import sys
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvfs import runtime
from kvfs.catalog import Catalog
from kvfs.config import Config
from kvfs.daemon.storage import expect_place
from kvfs.errors import CatalogError, ConfigError
from kvfs.s3.transfer import Terms
from kvfs.tiers import Bucket

log = logging.getLogger(__name__)

PATIENCE = 30.0  # s; the keeper waits for twice as long until a mount is prepared


def identity(config: Config) -> str:
    """Of this kvfs, as its NVMe directory has it; without one, by its machine and mount point.

    A directory that is new is to get the one that it is asked for with: the prefix has it by then.
    """
    if config.nvme is not None:
        path = config.nvme / "identity"
        return path.read_text().strip() if path.exists() else str(uuid.uuid4())
    where = f"kvfs:{runtime.machine()}:{config.mountpoint}"
    return str(uuid.uuid5(uuid.NAMESPACE_URL, where))


def notes(config: Config, directory: Path) -> str:
    """Where ids of uploads are noted; `directory` is of the mount's runtime files."""
    path = (directory if config.nvme is None else config.nvme) / "uploads"
    if config.s3 is not None:
        path.mkdir(mode=0o700, exist_ok=True)
    return str(path)


def prepare(config: Config, directory: Path, *, takeover: bool) -> Bucket | None:
    """Raises ConfigError if it cannot be used, and is required."""
    place = config.place
    if place is None:
        return None
    bucket = Bucket(
        *(place, None),
        most=config.dirty_most,
        delay=config.s3_delay,
        wait=config.s3_wait,
        shared=config.shared,
        exclusive=config.s3_exclusive,
        identity=identity(config),
        stream=config.s3_stream,
        recheck=config.s3_recheck,
    )
    kept = directory / "bucket"
    if takeover:
        if kept.exists():
            bucket.terms = Terms(**json.loads(kept.read_text()))
        else:
            bucket.health.unanswered(time.monotonic(), "it could not be used at the mount")
        return bucket
    _expect_place(config, str(place))
    found = _ask(bucket)
    if "terms" in found:
        bucket.terms = Terms(**found["terms"])
        kept.write_text(json.dumps(asdict(bucket.terms)))
        return bucket
    why = found.get("refused") or found["failed"]
    if config.s3_required:
        without = "s3_required=off mounts without it meanwhile"
        cure = "" if "refused" in found else f"; {place.cure} {without}"
        raise ConfigError(f"s3={config.s3}: {why}{cure}")
    log.warning("mounted without the bucket %s, until it answers: %s", place, why)
    bucket.health.unanswered(time.monotonic(), why)
    kept.unlink(missing_ok=True)
    return bucket


def _expect_place(config: Config, place: str) -> None:
    """Refuse another prefix than the catalog's before that is claimed. Raises ConfigError."""
    path = None if config.nvme is None else config.nvme / "catalog"
    if path is None or not path.exists():
        return
    try:
        catalog = Catalog(path, read_only=True)
    except (CatalogError, ConfigError) as error:  # it is said, or mended, when it is opened
        log.debug("catalog %s is not read yet: %s", path, error)
        return
    try:
        expect_place(catalog, place)
    finally:
        catalog.close()


def _ask(bucket: Bucket) -> dict[str, Any]:
    """By a process that is ended when it takes too long; boto3 is not loaded here."""
    place = bucket.place
    question = {"place": asdict(place), "identity": bucket.identity, "exclusive": bucket.exclusive}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvfs.movement.asking"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"{place} has not answered in {PATIENCE:.0f} s"}
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return {"failed": f"{place} could not be asked: {lines[-1] if lines else 'no reason'}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found

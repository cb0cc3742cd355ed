"""The bucket of a mount, made ready: a process of its own asks it before any change.

Contract: `prepare` raises ConfigError with the reason if the mount is to be refused. A takeover
asks nothing: the mount has found out the features of the store, and the runtime directory has them.
"""

import json
import logging
import subprocess
import sys
import time
import uuid
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from kvfs import own_files, runtime
from kvfs.catalog import Catalog
from kvfs.config import Config
from kvfs.daemon.storage import expect_place
from kvfs.errors import CatalogError, ConfigError
from kvfs.live import LiveConfig
from kvfs.s3.errors import OutageError
from kvfs.s3.transfer import Terms
from kvfs.tiers import Bucket, identity_in

log = logging.getLogger(__name__)

PATIENCE = 30.0  # s; the keeper waits for twice as long until a mount is prepared


def identity(config: Config) -> str:
    """Return the identity of this kvfs: from its NVMe directory, or of its machine and mount point.

    A new directory gets a new identity, with which the bucket is asked, so the prefix has it
    already. Raises ConfigError if the directory's identity is malformed.
    """
    if config.nvme is not None:
        return identity_in(config.nvme) or str(uuid.uuid4())
    where = f"kvfs:{runtime.machine()}:{config.mountpoint}"
    return str(uuid.uuid5(uuid.NAMESPACE_URL, where))


def notes(config: Config, directory: Path) -> str:
    """Return the directory for the ids of uploads; `directory` has the mount's runtime files."""
    path = (directory if config.nvme is None else config.nvme) / "uploads"
    if config.s3 is not None:
        path.mkdir(mode=0o700, exist_ok=True)
    return str(path)


def prepare(live: LiveConfig, directory: Path, *, takeover: bool) -> Bucket | None:
    """Return the bucket, None without one.

    If it is required and cannot be used, raises ConfigError or OutageError: the store refuses, or
    does not answer.
    """
    config, place = live.config, live.config.place
    if place is None:
        return None
    bucket = Bucket(
        *(place, None),
        most=config.dirty_most,
        exclusive=config.s3_exclusive,
        identity=identity(config),
    )

    def share(_: object) -> None:
        bucket.shared = live.config.shared

    live.observe("s3_delay", partial(setattr, bucket, "delay"))
    live.observe("s3_wait", partial(setattr, bucket, "wait"))
    live.observe("s3_recheck", partial(setattr, bucket, "recheck"))
    live.observe("s3_stream", partial(setattr, bucket, "stream"))
    live.observe("s3_shared", share)
    noted = directory / "bucket"
    if takeover:
        bucket.terms = _terms_before(noted)
        if bucket.terms is None:
            bucket.health.unanswered(time.monotonic(), "it could not be used at the mount")
        return bucket
    _expect_place(config, str(place))
    found = _ask(bucket)
    if "terms" in found:
        bucket.terms = Terms(**found["terms"])
        own_files.write(noted, json.dumps(asdict(bucket.terms)))
        return bucket
    why = found.get("refused") or found["failed"]
    if config.s3_required:
        without = "s3_required=off mounts without it meanwhile"
        if "refused" in found:
            raise ConfigError(f"s3={config.s3}: {why}")
        raise OutageError(f"s3={config.s3}: {why}; {place.cure} {without}")
    log.warning("mounted without the bucket %s, until it answers: %s", place, why)
    bucket.health.unanswered(time.monotonic(), why)
    noted.unlink(missing_ok=True)
    return bucket


def _terms_before(noted: Path) -> Terms | None:
    """Return the known features of the store. None: not known, so the bucket is asked again."""
    expected, cure = "what the store honours", "nothing, the store is asked again"
    try:
        told = own_files.read_table(noted, expected, cure)
        if told is None:
            return None
        kinds = {(name, type(value)) for name, value in asdict(Terms()).items()}
        if not {(name, type(value)) for name, value in told.items()} <= kinds:
            raise own_files.wrong(noted, str(told), expected, cure)
        return Terms(**told)
    except ConfigError as error:
        log.warning("the bucket is asked again, the note about it is damaged: %s", error)
        return None


def _expect_place(config: Config, place: str) -> None:
    """Refuse a prefix that differs from the catalog's before it is claimed. Raises ConfigError."""
    path = None if config.nvme is None else config.nvme / "catalog"
    if path is None or not path.exists():
        return
    try:
        catalog = Catalog(path, read_only=True)
    except (CatalogError, ConfigError) as error:  # opening it later reports or repairs this
        log.debug("catalog %s is not read yet: %s", path, error)
        return
    try:
        expect_place(catalog, place)
    finally:
        catalog.close()


def _ask(bucket: Bucket) -> dict[str, Any]:
    """Ask the bucket in a process that ends when it takes too long; boto3 is not loaded here."""
    place = bucket.place
    question = {"place": asdict(place), "identity": bucket.identity, "exclusive": bucket.exclusive}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvfs.movement.stores"],
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

"""Metrics and the page of a mount with a real bucket."""

import json
from collections.abc import Callable

import pytest

from kvfs.metrics.families import METRICS
from scripts.s3_server import Server
from tests.conftest import Mount
from tests.harness import Mounted, wait_for
from tests.mount.test_metrics import free_port, get, until, value
from tests.s3.rig import narrow, says_no_secret, send_away
from tests.s3.test_mounted import all_uploaded

Make = Callable[[str], Mounted]


@pytest.fixture
def made(s3: Server, bucket: str, mount: Mount) -> Make:
    """`made(options)` mounts with that bucket."""

    def make(options: str) -> Mounted:
        return mount(
            f"{options},s3=s3://{bucket}/p,s3_endpoint={s3.endpoint},s3_region=us-east-1,s3_delay=0.1"
        )

    return make


def test_a_scrape_of_a_mount_with_a_bucket_has_every_metric(
    made: Make, s3: Server, bucket: str
) -> None:
    metrics, web = free_port(), free_port()
    kv = made(f"ram=64M,nvme={{tmp}}/nvme,nvme_size=512M,metrics={metrics},web={web}")
    away = narrow(kv, "away")
    send_away(away, {"a": b"a" * 20_000, "b": b"b" * 20_000})
    assert (away / "a").read_bytes() == b"a" * 20_000
    all_uploaded(kv)
    samples = until(metrics, "kvfs_namespace_hits_total", 1, namespace="away", tier="s3")
    assert value(samples, "kvfs_bucket_uploads_total") >= 4
    assert value(samples, "kvfs_bucket_downloads_total") >= 1
    assert value(samples, "kvfs_hydrate_seconds_count", tier="s3") >= 1
    assert value(samples, "kvfs_open_seconds_count", tier="s3") == 1
    assert value(samples, "kvfs_namespace_open_seconds_count", namespace="away") == 1
    spilled = value(samples, "kvfs_evictions_total", reason="spilled")
    assert spilled >= 2
    there = {"namespace": "away", "reason": "spilled"}
    assert value(samples, "kvfs_namespace_evictions_total", **there) == spilled
    assert value(samples, "kvfs_dirty_objects", tier="s3") == 0
    names = {name.removesuffix("_bucket").removesuffix("_count") for name in samples}
    perhaps = {
        "kvfs_namespace_hit_ratio_estimate",
        "kvfs_bucket_errors_total",
    }  # errors are by class
    without_pool = {m.name for m in METRICS if not m.name.startswith("kvfs_pool_")}
    assert without_pool - names <= perhaps

    def now() -> str:
        return get(f"http://127.0.0.1:{web}/api/now")

    wait_for(lambda: '"uploads"' in now(), "the page has the bucket")
    shown = now() + get(f"http://127.0.0.1:{metrics}/metrics")
    assert "dirty_bytes" in json.loads(now())["tiers"]["s3"]
    assert bucket not in shown
    assert s3.credentials["AWS_ACCESS_KEY_ID"] not in shown
    says_no_secret(kv, s3.credentials["AWS_SECRET_ACCESS_KEY"])

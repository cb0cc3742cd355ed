"""Metrics without a mount: what is exported, documented, watched and drawn is the same."""

import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvfs.core.ledger.latencies import BOUNDS, Histogram, Latencies
from kvfs.core.ledger.ledger import COUNTERS
from kvfs.core.namespaces.drops import Reason
from kvfs.core.namespaces.namespace import COUNTERS as NAMESPACE_COUNTERS
from kvfs.fairness.admission import AdmissionResult
from kvfs.metrics import families
from kvfs.metrics.__main__ import Scrape, handler
from kvfs.metrics.address import EXPECTED, Address
from kvfs.metrics.families import METRICS, NAMESPACES_MOST, OTHERS
from kvfs.metrics.renamed import RENAMED
from kvfs.tiers.bucket import COUNTERS as BUCKET_COUNTERS
from kvfs.tiers.tier import PACKING_COUNTERS
from kvfs.web.serving import CONNECTIONS, Snapshot, WebServer
from tests.harness import PATIENCE, wait_for
from tests.unit.test_page import HOSTILE, code, get, served

ROOT = Path(__file__).parents[2]
OBSERVE = ROOT / "mount" / "observe"
RULES = OBSERVE / "kvfs.rules.yml"
DASHBOARD = json.loads((OBSERVE / "kvfs.grafana.json").read_text())
LEFT = (*(f"dropped_{reason}" for reason in families.REASONS), "spilled")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

POOL_COUNTERS = (
    *("lookups", "found", "absent_cached", "failures"),
    *("fetched", "fetched_bytes", "failed", "handed_over", "taken_over"),
    *("announced", "withdrawn", "unlinked", "conflicts", "stale"),
    *("served", "served_bytes", "served_failed", "reports_wrong"),
)


def numbers() -> Iterator[int]:
    """Never the same twice."""
    yield from range(1000, 1 << 30)


def status(unique: Iterator[int]) -> dict[str, Any]:
    """With a bucket, each number another one."""

    def counted(names: tuple[str, ...]) -> dict[str, int]:
        return {name: next(unique) for name in names}

    def tier() -> dict[str, Any]:
        fields = ("capacity_bytes", "used_bytes", "reserved_bytes", "objects", "hits", "state_s")
        return counted(fields) | {"state": "healthy", "why": "a secret", "path": "/secret"}

    latencies = Latencies(("ram", "nvme", "s3"))
    for kind in (latencies.open, latencies.hydrate, latencies.seal):
        for one in kind.values():
            one.counts[1], one.seconds = next(unique), next(unique)
    fetches = Histogram()
    fetches.counts[1], fetches.seconds = next(unique), next(unique)
    dirty = ("dirty_bytes", "dirty_objects", "dirty_most_bytes", "oldest_dirty_s", "to_delete")
    plain = ("uptime_s", "takeovers", "objects", "without_bucket", "open_handles", "writers")
    more = ("jobs", "trash", "reclaimable_bytes")
    reasons = tuple(f"dropped_{reason}" for reason in families.REASONS)
    return {
        "version": "7.8.9",
        "mountpoint": "/mnt/kv",
        "daemon_pid": 1,
        "keeper_pid": 0,
        "passthrough": {"on": True, "why": ""},
        "fast_open": {"on": True, "why": "", "objects": next(unique)},
        "huge_pages": {"on": False, "why": ""},
        "tiers": {
            "ram": tier(),
            "nvme": tier() | counted(PACKING_COUNTERS),
            "s3": tier()
            | counted((*dirty, *BUCKET_COUNTERS, "streaming", "in_conflict"))
            | {"loaded": True, "errors": {"DownError": next(unique)}},
        },
        **counted((*plain, *more)),
        "census_done": True,
        "writing_back": False,
        "counters": counted((*COUNTERS, *reasons, "promotions_skipped", "outrun")),
        "nvme_writes": counted(families.DECISIONS),
        "scrub": {
            "state": "paused",
            "why": "a secret",
            "pass": {"bytes": 1},
            "last": counted(("ended", "seconds")),
            "tiers": {"nvme": counted(("bytes", "objects", "rotten", "unread"))},
            **counted(("period_s", "began", "progress", "cpu_s")),
        },
        "errors": {"open": {"TierError": next(unique)}},
        "latencies": latencies.describe(),
        "namespaces": [namespace(".", unique)],
        "dropped": [],
        "models": [{"engine": "e", "model": "secret", "objects": 1, "bytes": 1}],
        "hot": [{"path": "secret", "opens": 1}],
        "pool": {
            "place": "redis://secret/kv",
            "index": {"up": True, "full": False, "why": "a secret"},
            "serves": True,
            "files_refused": False,
            "certificate": {**counted(("since", "until")), "ends_soon": False, "problem": ""},
            **counted(("objects", "bytes", "lag_s", "nodes_live", "hits", "streaming")),
            "counters": counted(POOL_COUNTERS),
            "fetch_seconds": fetches.describe(),
        },
        "options": {"s3_profile": "secret"},
    }


def namespace(name: str, unique: Iterator[int]) -> dict[str, Any]:
    return {
        "name": name,
        "problem": "",
        "settings": {"quota_hard": "3M"},
        "bytes": next(unique),
        "objects": next(unique),
        "tiers": {"ram": {"bytes": next(unique), "objects": next(unique)}},
        "counters": {counter: next(unique) for counter in (*NAMESPACE_COUNTERS, *LEFT)},
        "opens": {"count": next(unique), "sum_s": next(unique)},
        "following": "lru",
        "capacity_objects": next(unique),
        "hit_ratio_at": {"0.5": next(unique)},
    }


def scraped(found: dict[str, Any] | None) -> Samples:
    """Return the samples that Prometheus would get, by name and labels."""
    text = generate_latest(Scrape(found)).decode()
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{key} is there twice: Prometheus refuses that"
            samples[key] = sample.value
    return samples


def one(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


# The exported metrics


def leaves(found: Any) -> Iterator[float]:  # noqa: ANN401 - any JSON
    if isinstance(found, dict):
        for value in found.values():
            yield from leaves(value)
    elif isinstance(found, list):
        for value in found:
            yield from leaves(value)
    elif isinstance(found, int) and found >= 1000:
        yield found


def test_every_number_of_a_status_is_exported() -> None:
    made = status(numbers())
    values = set(scraped(made).values())
    cpu = {made["tiers"][tier][f"{way}_cpu_us"] for tier in ("nvme", "s3") for way in WAYS}
    missing = {number for number in leaves(made) if number not in values} - cpu
    assert not missing, missing
    assert {round(us / 1e6, 9) for us in cpu} <= {round(value, 9) for value in values}


WAYS = ("compress", "decompress")


def test_labels_of_metrics_are_those_in_the_code() -> None:
    assert set(families.DECISIONS) == set(get_args(AdmissionResult))
    assert set(get_args(Reason)) == set(families.REASONS)


def test_labels_are_of_few_kinds_and_say_no_secret() -> None:
    samples = scraped(status(numbers()))
    names = {label for _, labels in samples for label, _ in labels}
    assert names == {
        *("tier", "namespace", "state", "reason", "decision", "operation", "class", "by", "le"),
        *("version", "mountpoint", "times", "kind"),
    }
    assert not [key for key in samples if "secret" in str(key)]


def test_without_an_answer_there_is_that_and_nothing_else() -> None:
    assert scraped(None) == {("kvfs_up", frozenset()): 0.0}


def test_a_counter_is_there_before_anything_is_counted() -> None:
    """Counters by class of error are left out: there are many."""
    made = status(numbers())
    made["counters"], made["nvme_writes"], made["errors"] = {}, {}, {}
    made["namespaces"][0]["counters"] = {}
    made["tiers"]["s3"]["errors"] = {}
    there = {name for name, _ in scraped(made)}
    counters = {metric.name for metric in METRICS if metric.type == "counter"}
    assert counters - there == {"kvfs_errors_total", "kvfs_bucket_errors_total"}


def test_any_name_of_a_namespace_can_be_scraped() -> None:
    unique = numbers()
    made = status(unique)
    names = ['quoted "one"', "two\nlines", "back\\slash", "bytes \udcff", "bytes \\udcff", "ü"]
    made["namespaces"] = [namespace(name, unique) for name in names]
    samples = scraped(made)
    found = {
        dict(labels)["namespace"] for name, labels in samples if name == "kvfs_namespace_bytes"
    }
    assert found == {*names} - {"bytes \udcff"}
    both = sum(space["bytes"] for space in made["namespaces"][3:5])
    assert one(samples, "kvfs_namespace_bytes", namespace="bytes \\udcff") == both


def test_very_many_namespaces_are_one_from_some_number_on() -> None:
    unique = numbers()
    made = status(unique)
    spaces = [namespace(f"n{number}", unique) for number in range(NAMESPACES_MOST + 3)]
    made["namespaces"] = spaces
    samples = scraped(made)
    found = [labels for name, labels in samples if name == "kvfs_namespace_bytes"]
    assert len(found) == NAMESPACES_MOST + 1
    rest = sum(space["counters"]["read_ram"] for space in spaces[NAMESPACES_MOST:])
    hits = one(samples, "kvfs_namespace_hits_total", namespace=OTHERS, tier="ram")
    assert hits == rest


def test_a_histogram_counts_up_to_and_with_its_bounds() -> None:
    latencies = Latencies(["ram"])
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, BOUNDS[-1] * 2):
        latencies.open["ram"].observe(seconds)
    made = status(numbers())
    made["latencies"] = latencies.describe()
    samples = scraped(made)

    def upto(bound: str) -> float:
        return one(samples, "kvfs_open_seconds_bucket", tier="ram", le=bound)

    assert [upto(str(BOUNDS[0])), upto(str(BOUNDS[1])), upto(str(BOUNDS[-1]))] == [2, 3, 3]
    assert upto("+Inf") == one(samples, "kvfs_open_seconds_count", tier="ram") == 4
    assert one(samples, "kvfs_open_seconds_sum", tier="ram") == pytest.approx(60.0001, abs=1e-4)


def test_bounds_rise() -> None:
    assert list(BOUNDS) == sorted(set(BOUNDS))
    assert len(Histogram().counts) == len(BOUNDS) + 1


# The documents of the metrics


def test_each_metric_is_documented_and_each_documented_one_exists() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = re.findall(
        r"^\| `(kvfs_\w+)` \| (\w+) \| ([^|]*)\| (\S.*) \|$", text, re.MULTILINE
    )
    found = [
        (name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in documented
    ]
    meanings = {name: meaning.replace("`", "") for name, _, _, meaning in documented}
    strange = [one.name for one in METRICS if not meanings[one.name].startswith(one.help[:-1])]
    assert not strange, f"docs/metrics.md says something else of {strange}"
    exported = [(metric.name, str(metric.type), metric.labels) for metric in METRICS]
    assert sorted(found) == sorted([("kvfs_up", "gauge", ()), *exported])


def exported_names() -> set[str]:
    """Samples, so that of a histogram there are three."""
    return {name for name, _ in scraped(status(numbers()))}


def test_alerts_use_exported_metrics_only() -> None:
    assert set(re.findall(r"kvfs_\w+", RULES.read_text())) <= exported_names()


def test_dashboard_uses_exported_metrics_only() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 0
    assert all(panel["title"] and panel["targets"] for panel in panels)
    exprs = expressions()
    assert set(re.findall(r"kvfs_\w+", " ".join(exprs))) <= exported_names()
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used == variables == {"datasource", "instance", "namespace"}


def test_panels_of_namespaces_follow_the_variable() -> None:
    for expression in expressions():
        for selector in re.findall(r"kvfs_namespace_\w+\{([^}]*)\}", expression):
            assert 'namespace=~"$namespace"' in selector, expression


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        columns, rows = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        cells = {(column, row) for column in columns for row in rows}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_old_names_have_the_samples_of_the_new_ones_and_are_not_used() -> None:
    unique = numbers()
    samples = scraped(status(unique))
    assert set(RENAMED) <= {metric.name for metric in METRICS}
    for new, old in RENAMED.items():
        of_new = {labels: value for (name, labels), value in samples.items() if name == new}
        of_old = {labels: value for (name, labels), value in samples.items() if name == old}
        assert of_new == of_old != {}, (old, new)
    used = " ".join([*expressions(), RULES.read_text()])
    assert not set(RENAMED.values()) & set(re.findall(r"kvfs_\w+", used))
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert dict(re.findall(r"^\| `(kvfs_\w+)` \| `(kvfs_\w+)` \|$", text, re.MULTILINE)) == {
        old: new for new, old in RENAMED.items()
    }


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_alerts_are_understood() -> None:
    assert "SUCCESS" in promtool("check", "rules", RULES)


def test_expressions_of_the_dashboard_are_understood(tmp_path: Path) -> None:
    rules = [
        {
            "record": f"drawn:{number}",
            "expr": expr.replace("$__rate_interval", "5m")
            .replace("$instance", ".*")
            .replace("$namespace", ".*"),
        }
        for number, expr in enumerate(expressions())
    ]
    file = tmp_path / "rules.json"  # which is YAML as well
    file.write_text(json.dumps({"groups": [{"name": "drawn", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", file)


def test_promtool_accepts_the_metrics() -> None:
    """One rule of promtool is left out: a counter may be named after the things that it counts."""
    text = generate_latest(Scrape(status(numbers())))
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=text,
        capture_output=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


# Each alert, with a cause and without: what is sampled each minute
CAUSES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "KvfsNotScraped": ({'up{job="kvfs"}': "0x90"}, {}),
    "KvfsSilent": ({"kvfs_up": "0x90"}, {}),
    "KvfsKeeperDead": ({"kvfs_keeper_up": "0x90"}, {}),
    "KvfsTakeover": ({"kvfs_takeovers_total": "0x80 1x10"}, {}),
    "KvfsTakeovers": ({"kvfs_takeovers_total": "0+1x90"}, {}),
    "KvfsDefect": ({"kvfs_defects_total": "0x80 1x10"}, {}),
    "KvfsTierDown": (
        {'kvfs_tier_state{tier="nvme",state="down"}': "1x90"},
        {"tier": "nvme", "state": "down"},
    ),
    "KvfsTierSuspect": (
        {'kvfs_tier_state{tier="nvme",state="suspect"}': "1x90"},
        {"tier": "nvme", "state": "suspect"},
    ),
    "KvfsLost": ({'kvfs_evictions_total{reason="lost"}': "0x80 2x10"}, {"reason": "lost"}),
    "KvfsDamaged": (
        {"kvfs_copies_quarantined_total": "0x80 1x10", "kvfs_copies_missing_total": "0x90"},
        {},
    ),
    "KvfsRotFound": (
        {'kvfs_scrub_rotten_copies_total{tier="nvme"}': "0x80 1x10"},
        {"tier": "nvme"},
    ),
    "KvfsScrubLate": (
        {"kvfs_scrub_began_timestamp_seconds": "60x90", "kvfs_scrub_period_seconds": "600x90"},
        {},
    ),
    "KvfsCatalogUnreadable": ({"kvfs_inodes_unreadable": "1x90"}, {}),
    "KvfsMoversDie": ({"kvfs_mover_failures_total": "0+1x90"}, {}),
    "KvfsDirtyFull": (
        {'kvfs_dirty_bytes{tier="s3"}': "95x90", 'kvfs_dirty_limit_bytes{tier="s3"}': "100x90"},
        {"tier": "s3"},
    ),
    "KvfsDirtyOld": ({'kvfs_dirty_oldest_seconds{tier="s3"}': "0+60x90"}, {"tier": "s3"}),
    "KvfsBucketFails": ({"kvfs_bucket_failures_total": "0+1x90"}, {}),
    "KvfsPoolIndexDown": ({"kvfs_pool_index_up": "0x90"}, {}),
    "KvfsPoolIndexFull": ({"kvfs_pool_index_full": "1x90"}, {}),
    "KvfsPoolCertificateEnds": ({"kvfs_pool_certificate_ends_soon": "1x90"}, {}),
    "KvfsPoolFilesRefused": ({"kvfs_pool_files_refused": "1x90"}, {}),
    "KvfsPoolServesNobody": ({"kvfs_pool_serving": "0x90"}, {}),
    "KvfsPoolFetchesFail": ({"kvfs_pool_fetch_failures_total": "0+1x90"}, {}),
    "KvfsWithoutBucket": ({"kvfs_objects_out_of_reach": "5x90"}, {}),
    "KvfsOpensSlow": (
        {
            'kvfs_open_seconds_bucket{tier="nvme",le="0.05"}': "0+90x90",
            'kvfs_open_seconds_bucket{tier="nvme",le="0.1"}': "0+100x90",
            'kvfs_open_seconds_bucket{tier="nvme",le="+Inf"}': "0+100x90",
        },
        {"tier": "nvme"},
    ),
    "KvfsNamespaceHomeless": (
        {'kvfs_namespace_without_tier{namespace="chat"}': "1x90"},
        {"namespace": "chat"},
    ),
    "KvfsNoSpace": (
        {'kvfs_errors_total{operation="create",class="NoSpaceError"}': "_x85 1x5"},
        {},
    ),
    "KvfsQuotaRefuses": (
        {'kvfs_errors_total{operation="flush",class="QuotaError"}': "7x85 8x5"},
        {},
    ),
    "KvfsQuotaReached": (
        {
            'kvfs_namespace_bytes{namespace="chat"}': "96x90",
            'kvfs_namespace_quota_bytes{namespace="chat",kind="hard"}': "100x90",
        },
        {"namespace": "chat"},
    ),
    "KvfsPassthroughOff": ({"kvfs_passthrough": "0x90"}, {}),
}
WELL = {
    'up{job="kvfs"}': "1x90",
    "kvfs_up": "1x90",
    "kvfs_keeper_up": "1x90",
    "kvfs_takeovers_total": "7x90",
    "kvfs_defects_total": "7x90",
    'kvfs_tier_state{tier="nvme",state="down"}': "0x90",
    'kvfs_tier_state{tier="nvme",state="suspect"}': "0x90",
    'kvfs_evictions_total{reason="lost"}': "7x90",
    'kvfs_evictions_total{reason="evicted"}': "0+7x90",
    "kvfs_copies_quarantined_total": "7x90",
    "kvfs_copies_missing_total": "7x90",
    'kvfs_scrub_rotten_copies_total{tier="nvme"}': "7x90",
    "kvfs_scrub_began_timestamp_seconds": "0+60x90",
    "kvfs_scrub_period_seconds": "600x90",
    "kvfs_inodes_unreadable": "0x90",
    "kvfs_mover_failures_total": "7x90",
    'kvfs_dirty_bytes{tier="s3"}': "50x90",
    'kvfs_dirty_limit_bytes{tier="s3"}': "100x90",
    'kvfs_dirty_oldest_seconds{tier="s3"}': "5x90",
    "kvfs_bucket_failures_total": "7x90",
    "kvfs_pool_index_up": "1x90",
    "kvfs_pool_index_full": "0x90",
    "kvfs_pool_serving": "1x90",
    "kvfs_pool_certificate_ends_soon": "0x90",
    "kvfs_pool_files_refused": "0x90",
    "kvfs_pool_fetch_failures_total": "7x90",
    "kvfs_objects_out_of_reach": "0x90",
    'kvfs_open_seconds_bucket{tier="nvme",le="0.05"}': "0+100x90",
    'kvfs_open_seconds_bucket{tier="nvme",le="+Inf"}': "0+100x90",
    'kvfs_namespace_without_tier{namespace="chat"}': "0x90",
    'kvfs_errors_total{operation="create",class="NoSpaceError"}': "7x90",
    'kvfs_errors_total{operation="lookup",class="NotFoundError"}': "0+7x90",
    'kvfs_namespace_bytes{namespace="chat"}': "90x90",
    'kvfs_namespace_quota_bytes{namespace="chat",kind="hard"}': "100x90",
    'kvfs_namespace_bytes{namespace="agents"}': "90x90",
    'kvfs_namespace_quota_bytes{namespace="agents",kind="hard"}': "0x90",
    "kvfs_passthrough": "1x90",
}


def alerts() -> dict[str, str]:
    """Their severities, by name."""
    found = re.findall(
        r"- alert: (\w+)\n(?:.*\n)*?\s+labels: \{severity: (\w+)\}", RULES.read_text()
    )
    return dict(found)


def series(samples: dict[str, str]) -> list[dict[str, str]]:
    """Of one mount."""
    labelled = {
        (f'{name[:-1]},instance="m"}}' if "{" in name else f'{name}{{instance="m"}}'): values
        for name, values in samples.items()
    }
    return [{"series": name, "values": values} for name, values in labelled.items()]


def test_each_alert_has_its_cause(tmp_path: Path) -> None:
    assert alerts().keys() == CAUSES.keys()
    tests = []
    for name, (samples, labels) in CAUSES.items():
        own = {"job": "kvfs"} if name == "KvfsNotScraped" else {}
        expected = {"exp_labels": labels | own | {"instance": "m", "severity": alerts()[name]}}
        for values, fires in ((samples, [expected]), (WELL, [])):
            asked = {"eval_time": "90m", "alertname": name, "exp_alerts": fires}
            tests.append(
                {"interval": "1m", "input_series": series(values), "alert_rule_test": [asked]}
            )
    plain = tmp_path / "plain.yml"  # a test would have to repeat the annotations
    text = RULES.read_text()
    plain.write_text(re.sub(r" +annotations:\n +summary: .*\n", "", text))
    file = tmp_path / "tests.json"
    file.write_text(json.dumps({"rule_files": [str(plain)], "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", file)


# Requests to daemons


def test_many_that_ask_at_once_ask_the_daemon_once() -> None:
    asked: list[float] = []
    let_go = threading.Event()

    def ask(patience: float) -> dict[str, Any]:
        asked.append(patience)
        assert let_go.wait(PATIENCE)
        return {"it": 1}

    snapshot = Snapshot(ask, fresh=3600.0)  # the machine may be busy
    found: list[dict[str, Any] | None] = []
    threads = [
        threading.Thread(target=lambda: found.append(snapshot.look(PATIENCE))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    let_go.set()
    for thread in threads:
        thread.join()
    assert found == [{"it": 1}] * 5
    assert len(asked) == 1


def test_waiting_for_a_silent_daemon_is_bounded() -> None:
    let_go, begun = threading.Event(), threading.Event()

    def ask(_: float) -> None:
        begun.set()
        assert let_go.wait(PATIENCE)

    snapshot = Snapshot(ask)
    first = threading.Thread(target=snapshot.look, args=[PATIENCE])
    first.start()
    try:
        assert begun.wait(PATIENCE)
        assert snapshot.look(0.01) is None
    finally:
        let_go.set()
        first.join()


# Where


@pytest.mark.parametrize(
    ("text", "address", "private"),
    [
        ("9095", "127.0.0.1:9095", True),
        ("localhost:1", "127.0.0.1:1", True),
        ("127.0.0.2:65535", "127.0.0.2:65535", True),
        ("0.0.0.0:80", "0.0.0.0:80", False),
        ("[::1]:9095", "[::1]:9095", True),
        ("[::]:9095", "[::]:9095", False),
        ("/run//kvfs/m.sock", "/run/kvfs/m.sock", True),
    ],
)
def test_an_address_is_understood(text: str, address: str, *, private: bool) -> None:
    found = Address.parse(text)
    assert (str(found), found.private) == (address, private)
    assert Address.parse(str(found)) == found


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "65536", "x", "host:80", ":80", "1.2.3:80", "::1:80", "[1.2.3.4]:80", "80:"),
        *("[::1]", "-1", "m.sock", "/" + 107 * "x", "/x\0", "127.0.0.1:80:90", "8 0"),
    ],
)
def test_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(EXPECTED)):
        Address.parse(text)


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (get("/metrics"), 200),
        (get("/metrics").replace(b"GET", b"HEAD"), 200),
        (get("/metrics", "localhost"), 200),
        (get("/metrics", "evil.example"), 421),
        (get("/" + HOSTILE), 404),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"POST /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 405),
        (f"{HOSTILE} / HTTP/1.1\r\n\r\n".encode(), 405),
    ],
)
def test_metrics_have_the_manners_of_the_page(request_: bytes, wanted: int) -> None:
    with served(handler(Snapshot(lambda _: None), private=True)) as ask:
        answer = ask(request_)
        assert code(answer) == wanted
        assert b"script>" not in answer
        assert (b"kvfs_up" in answer) == (wanted == 200 and request_.startswith(b"GET"))
    with served(handler(Snapshot(lambda _: None), private=False)) as ask:
        assert code(ask(get("/metrics", "gpu7.example:9095"))) == 200


def test_silent_connection_makes_way_for_a_request() -> None:
    """Any process of this machine reaches the port; a scraper must still get its answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = WebServer(listening, handler(Snapshot(lambda _: None), private=True))
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        before = threading.active_count()
        serving.start()
        silent = [socket.create_connection(listening.getsockname()) for _ in range(200)]
        try:
            wait_for(lambda: _closed(silent[0]), "the oldest is closed")
            with socket.create_connection(listening.getsockname(), timeout=PATIENCE) as asking:
                asking.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                told = b"".join(iter(lambda: asking.recv(1 << 16), b""))
            assert b"kvfs_up 0" in told
            most = before + 1 + CONNECTIONS
            wait_for(lambda: threading.active_count() <= most, "no more threads than that are left")
        finally:
            for one in silent:
                one.close()
            server.shutdown()
            serving.join()
            server.server_close()


def _closed(connection: socket.socket) -> bool:
    connection.setblocking(False)  # noqa: FBT003 (socket's own)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True

"""The health of a tier after failures, silence and probes."""

import logging

import pytest

from kvfs.tiers.calls import DOWN_AFTER, HEALTHY_AFTER, Health


@pytest.fixture
def health() -> Health:
    return Health("nvme tier /data", 0.0)


def bring_down(health: Health) -> None:
    for moment in range(DOWN_AFTER):
        health.probed(moment, "probe: EIO")


def test_tier_is_suspect_after_a_failure_and_healthy_after_probes(health: Health) -> None:
    health.failed(1.0, "open: EIO")
    assert (health.state, health.why, health.since) == ("suspect", "open: EIO", 1.0)
    for moment in range(1, HEALTHY_AFTER):
        health.probed(1.0 + moment)
        assert health.state == "suspect"
    health.probed(9.0)
    assert (health.state, health.why, health.since) == ("healthy", "", 9.0)


def test_failures_alone_bring_nothing_down(health: Health) -> None:
    """A file in a bad place of a good disk fails for ever."""
    for moment in range(1000):
        health.failed(moment, "open: EIO")
        health.probed(moment)
    assert (health.state, health.since) == ("suspect", 0.0)


def test_probes_that_fail_bring_down(health: Health) -> None:
    health.probed(1.0, "probe: EIO")
    assert health.state == "suspect"
    health.probed(2.0)  # in a row they must be
    for _ in range(DOWN_AFTER - 1):
        health.probed(3.0, "probe: EIO")
        assert health.state == "suspect"
    health.probed(4.0, "probe: EROFS")
    assert (health.state, health.why, health.since) == ("down", "probe: EROFS", 4.0)
    assert health.down
    assert not health.stuck  # a tier that answers may be asked


def test_silence_brings_down_at_once_until_a_probe_is_answered(health: Health) -> None:
    health.unanswered(1.0, "open has no answer")
    assert health.down
    assert health.stuck
    health.unanswered(2.0, "create has no answer")
    assert health.since == 1.0
    health.failed(3.0, "open: EIO")
    assert health.why == "create has no answer"
    health.probed(4.0, "probe: EIO")
    assert health.down
    assert not health.stuck


def test_tier_that_comes_back_is_suspect_first(health: Health) -> None:
    bring_down(health)
    states = []
    for moment in range(1 + HEALTHY_AFTER):
        health.probed(10.0 + moment)
        states.append(health.state)
    assert states == ["suspect"] * (HEALTHY_AFTER - 1) + ["healthy"] * 2


def test_tier_that_fails_again_is_down(health: Health) -> None:
    bring_down(health)
    health.probed(5.0)
    bring_down(health)
    assert health.down


def test_each_change_is_logged_once(health: Health, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(10):
            health.failed(0.0, "open: EIO")
        for _ in range(5):
            bring_down(health)
            health.unanswered(1.0, "open has no answer")
        for _ in range(10):
            health.probed(2.5)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "nvme tier /data is down, nothing new goes there: probe: EIO"),
        ("INFO", "nvme tier /data answers again after 1.5 s"),
        ("INFO", "nvme tier /data is healthy again"),
    ]

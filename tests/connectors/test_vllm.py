"""kvfs's connector in the real vLLM 0.33.0 on a CPU, and in its engine core with ranks."""

import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Mount
from tests.connectors.conftest import Client
from tests.harness import KVFS, Mounted

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def mounted(mount: Mount) -> Mounted:
    return mount("ram=256M,nvme={tmp}/nvme,nvme_size=1G")


def answers(found: dict[str, Any]) -> list[list[int]]:
    tokens: list[list[int]] = found["tokens"]
    return tokens


def test_a_model_answers_from_the_cache_as_without_it(
    mounted: Mounted, client: Client, tmp_path: Path
) -> None:
    """A Llama without a cache, filling one, with preemption, and with missing blocks."""
    place, config = mounted.path / "llama", tmp_path / "vllm.sh"
    made: list[str | Path] = [*KVFS, "ns", "create", place, "--for", "vllm-native"]
    subprocess.run(made, check=True, capture_output=True)
    shown: list[str | Path] = [*KVFS, "connect", "vllm", place, "--native"]
    config.write_text(subprocess.run(shown, check=True, capture_output=True, text=True).stdout)
    run = ("run_vllm.py", place, "--config", str(config))

    plain = client(*run, "--plain")
    filled = client(*run)
    assert filled["base"] == "KVConnectorBase_V1"
    assert answers(filled) == answers(plain)
    assert filled["stats"]["blocks_saved"] > 0
    assert filled["stats"]["save_errors"] == filled["stats"]["load_errors"] == 0

    loaded = client(*run, "--pages", "34")
    assert answers(loaded) == answers(plain)
    # 320 to 326 tokens in blocks of 64; the last token is computed, and so is its page of 32.
    assert loaded["cached"][:8] == [288, 320, 320, 320, 320, 320, 320, 0]
    assert loaded["cached"][8] > 0, "what was answered is cached as well"
    assert loaded["preempted"] > 0
    for one, other in zip(loaded["logprobs"], plain["logprobs"], strict=True):
        assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(one, other, strict=True))

    gone = client(*run, "--vanish", "2")
    assert answers(gone) == answers(plain)
    assert gone["asked"]
    assert gone["stats"]["blocks_absent"] > 0


def test_every_rank_has_the_bytes_that_it_saved(mounted: Mounted, client: Client) -> None:
    """All memory layouts, two ranks, MLA, lost blocks and preemption; checked at each step."""
    found = client("drive_vllm.py", mounted.path)
    preempted = 0
    for name, runs in found["variants"].items():
        first, second = runs["first"], runs["second"]
        assert min(first["checked"] + second["checked"]) > 0, name
        assert min(second["cached"]) > 0, name
        assert runs["salted"] == 0, name
        preempted += first["preempted"] + second["preempted"]
        for stats in second["stats"]:
            assert stats["load_errors"] == stats["save_errors"] == 0, name
    assert preempted > 0
    _, lossy = found["variants"]["two ranks that lose blocks"]["second"]["stats"]
    assert lossy["blocks_absent"] > 0
    saving, other = found["variants"]["MLA, one copy for two ranks"]["first"]["stats"]
    assert saving["blocks_saved"] > other["blocks_saved"] == 0
    assert found["local"][1] == 128, "the rest of a block whose beginning vLLM had"

    policy, multiple, option, model, function, window = found["refused"]
    assert "kv_load_failure_policy='fail': expected 'recompute'" in policy
    assert "block_tokens=24: expected a multiple of 16" in multiple
    assert "'paht': expected one of path, block_tokens" in option
    assert model.startswith("SpecMismatchError")
    assert '"model":"another"' in model
    assert "hf_overrides is a function" in function
    assert "SlidingWindowSpec: expected one group of layers" in window

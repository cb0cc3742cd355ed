"""A trace replayed on a real mount has the hits that the simulator predicts."""

import json
import random
from pathlib import Path

from click.testing import CliRunner

from kvfs.cli import main
from kvfs.simulation.sweep import simulate
from kvfs.simulation.trace import Trace, read
from tests.conftest import Mount
from tests.conversations import write

SEED = 4


def test_with_room_for_everything_each_block_misses_once(mount: Mount, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    file = tmp_path / "trace.jsonl"
    write(file, random.Random(SEED))
    kv = mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M")
    result = CliRunner().invoke(main, ["replay", str(file), str(kv.path), "--json"])
    assert result.exit_code == 0, result.output
    assert result.stderr == "", "it is a kvfs, and nothing is to be noted"
    found = json.loads(result.stdout)
    trace = Trace(read(str(file)), str(file))
    expected = simulate(trace, "lru", trace.unique)
    assert expected.object_hits > 100
    assert found["token_hit_ratio"] == expected.token_ratio
    assert found["object_hit_ratio"] == expected.object_ratio
    assert (found["stored"], found["refused"]) == (trace.unique, 0)
    assert list(kv.path.iterdir()) == []

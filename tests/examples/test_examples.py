"""The examples as a reader runs them: processes, on a real mount, with a small model."""

import re
import subprocess
import sys
from pathlib import Path

from scripts.s3_server import Server
from tests.conftest import Mount

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--preset", "tiny", "--threads", "1")
CHAT = ("chat.py", *SMALL, "--shared", "256", "--block", "32", "--new", "4")
WEIGHTS = ("model_loading.py", "--hidden", "64", "--layers", "3", "--shard", "1MB")


def run(folder: Path, script: str, *arguments: object, code: int = 0) -> str:
    """The output of an example."""
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, cwd=folder
    )
    print(done.stdout, done.stderr)
    assert done.returncode == code
    return done.stdout + done.stderr


def cached(printed: str) -> dict[str, tuple[int, int]]:
    """How many tokens of each prompt were cached, and how many it has."""
    found = re.findall(r"^(turn \d|somebody else), (\d+) of (\d+) ", printed, re.MULTILINE)
    return {name: (int(some), int(all_)) for name, some, all_ in found}


def test_chat(mount: Mount, tmp_path: Path) -> None:
    kv = mount("ram=256M,nvme={tmp}/nvme,nvme_size=512M")
    script, *arguments = CHAT
    printed = run(tmp_path, script, kv.path, *arguments)
    assert "a namespace of kvfs" in printed
    prompts = cached(printed)
    assert len(prompts) == 4
    for name, (some, all_) in prompts.items():
        expected = 256 if name == "somebody else" else (all_ - 1) // 32 * 32
        assert some == expected, "what the first process has saved is not all there"
    assert printed.count("is the one recomputed, logits equal bit by bit, reply the same") == 4
    assert "plotted: chat.png" in printed
    assert (tmp_path / "chat.png").read_bytes().startswith(b"\x89PNG")


def test_chat_in_any_directory_and_when_a_block_is_another(tmp_path: Path) -> None:
    """The comparison fails if a block is another one."""
    script, *arguments = CHAT
    printed = run(tmp_path, script, tmp_path, *arguments, "--dtype", "bfloat16")
    assert "a directory, no kvfs" in printed
    assert cached(printed)["somebody else"][0] == 256
    assert printed.count("logits equal bit by bit, reply the same") == 4
    (namespace,) = tmp_path.glob("chat-*")
    for path in namespace.glob("*/*"):
        path.write_bytes(path.read_bytes()[::-1])
    printed = run(tmp_path, script, tmp_path, *arguments, "--dtype", "bfloat16", code=1)
    assert "logits DIFFER by" in printed
    assert "the answers from the cache are not those without it" in printed


def test_chat_without_its_directory(tmp_path: Path) -> None:
    printed = run(tmp_path, "chat.py", tmp_path / "gone", code=2)
    assert "gone: expected a directory that is there" in printed


def test_model_loading_through_a_bucket(
    mount: Mount, s3: Server, bucket: str, tmp_path: Path
) -> None:
    kv = mount(
        "ram=256M,nvme={tmp}/nvme,nvme_size=512M,"
        f"s3=s3://{bucket}/p,s3_endpoint={s3.endpoint},s3_region=us-east-1"
    )
    script, *arguments = WEIGHTS
    printed = run(tmp_path, script, kv.path, *arguments)
    steps = ("kvfs flush --wait", "kvfs evict --to s3", "kvfs warm", "mapped by safetensors")
    places = [printed.index(step) for step in steps]
    assert places == sorted(places)
    assert re.search(r"all \d+ tensors are equal", printed)
    assert int(re.findall(r"weights in (\d+) files", printed)[0]) > 1
    downloads = kv.status()["tiers"]["s3"]["downloads"]
    assert downloads >= 3, "what was mapped did not come from the bucket"


def test_model_loading_in_any_directory(tmp_path: Path) -> None:
    script, *arguments = WEIGHTS
    printed = run(tmp_path, script, tmp_path, *arguments)
    assert "no kvfs here" in printed
    assert "tensors are equal" in printed


def test_the_benchmark_of_both_runs(tmp_path: Path) -> None:
    """`scripts.bench.ttft --quick`, with a mount of its own; its figures do not matter here."""
    output = tmp_path / "ttft.json"
    command = [
        sys.executable,
        "-m",
        "scripts.bench.ttft",
        "--quick",
        "--threads",
        "1",
        "--json",
        str(output),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, cwd=EXAMPLES.parent
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "break-even" in done.stdout
    assert output.stat().st_size

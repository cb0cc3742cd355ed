"""`kvfs connect` on a mount: users can paste its output, and it names wrong settings."""

import json
import subprocess

import pytest

from kvfs import profiles
from tests.conftest import Mount
from tests.harness import KVFS, Mounted

QUOTA = "quota_hard=500G"


@pytest.fixture(scope="module")
def mounted(module_mount: Mount) -> Mounted:
    return module_mount("ram=64M,nvme={tmp}/nvme,nvme_size=256M")


def kvfs(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*KVFS, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.parametrize("engine", profiles.ENGINES)
def test_each_way_alone_can_be_pasted(mounted: Mounted, engine: str) -> None:
    """--file and --native print the output of `ns create --for`, and nothing else."""
    ways = profiles.engine(engine)
    for flag, connector in (("--file", ways.files), ("--native", ways.native)):
        place = mounted.path / f"{engine}{flag}"
        if connector is None:
            kvfs("ns", "create", place)
            refused = kvfs("connect", engine, place, flag, code=2)
            assert ways.lacks in refused.stderr
            assert not refused.stdout
            continue
        printed = kvfs("ns", "create", place, "--for", connector, QUOTA)
        only = kvfs("connect", engine, place, flag)
        assert only.stdout == printed.stdout
        assert not only.stderr


def test_connect_prints_the_file_and_the_native_configuration(mounted: Mounted) -> None:
    place = mounted.path / "both"
    files = kvfs("ns", "create", place, "--for", "sglang-file", QUOTA).stdout
    both = kvfs("connect", "sglang", place)
    native = kvfs("connect", "sglang", place, "--native")
    assert files in both.stdout
    assert native.stdout in both.stdout
    for what, by_files, natively in profiles.engine("sglang").gives:
        row = next(line for line in both.stdout.splitlines() if line.strip().startswith(what))
        assert by_files in row
        assert natively in row
    said = "namespace both has prefix=off, sglang-native needs prefix=on"
    assert said in native.stderr
    assert said in both.stderr
    assert "sglang-file needs" not in both.stderr


def test_files_do_not_fit_a_namespace_of_prefixes(mounted: Mounted) -> None:
    place = mounted.path / "prefixes"
    kvfs("ns", "create", place, "prefix=on", "eviction=never")
    said = kvfs("connect", "lmcache", place, "--file").stderr
    assert "namespace prefixes has prefix=on, lmcache-fs needs prefix=off" in said
    assert "namespace prefixes has eviction=never, lmcache-fs needs eviction=adaptive" in said


def test_json_has_all_of_it(mounted: Mounted) -> None:
    place = mounted.path / "whole"
    kvfs("ns", "create", place, "--for", "lmcache-fs")
    found = json.loads(kvfs("connect", "lmcache", place, "--json").stdout)
    assert (found["engine"], found["namespace"]) == ("lmcache", str(place))
    files, native = found["ways"]["files"], found["ways"]["native"]
    assert files["connector"] == "lmcache-fs"
    assert files["configuration"] == kvfs("connect", "lmcache", place, "--file").stdout
    assert files["misfits"] == {}
    assert native["misfits"] == {"prefix": "on"}
    assert {row["what"] for row in found["gives"]} >= {"longest prefix", "dropped first"}
    (only,) = json.loads(kvfs("connect", "lmcache", place, "--native", "--json").stdout)["ways"]
    assert only == "native"


def test_a_name_will_do(mounted: Mounted) -> None:
    kvfs("ns", "create", mounted.path / "only-here", "--for", "vllm-fs")
    named = subprocess.run(
        [*KVFS, "connect", "vllm", "only-here", "--file"],
        capture_output=True,
        text=True,
        check=False,
    )
    # Tests run beside each other: a name alone is refused where more than one kvfs is mounted.
    if named.returncode:
        assert "kvfs are mounted; give the whole path" in named.stderr
    else:
        assert named.stdout == kvfs("connect", "vllm", mounted.path / "only-here", "--file").stdout


def test_unknown_engines_and_bare_directories_are_refused(mounted: Mounted) -> None:
    place = mounted.path / "bare"
    place.mkdir()
    bad = kvfs("connect", "vlm", place, code=2)
    engines = "vllm, lmcache, sglang, vua, llamacpp, transformers"
    assert bad.stderr == f"kvfs: unknown engine 'vlm': expected one of {engines}\n"
    bare = kvfs("connect", "vllm", place, code=2)
    assert "the directory has no settings of its own" in bare.stderr
    kvfs("connect", "vllm", mounted.path / "absent", code=2)

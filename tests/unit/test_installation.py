"""`pip install` in an engine's environment: no libfuse, no compiler, no daemon."""

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("kvfs", "setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
# The daemon and the commands need these; an engine's environment need not have them.
ABSENT = (
    *("blosc", "boto3", "botocore", "click", "msgpack", "prometheus_client", "pyfuse3", "rich"),
    *("rocksdict", "trio", "trio_parallel"),
)


def build(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`pip wheel` on a machine whose pkg-config knows no library."""
    source = tmp_path / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check")
    return subprocess.run(
        [*pip, "--no-index", "--no-build-isolation", "--no-deps", "-w", tmp_path / "dist", source],
        env=os.environ | {"PKG_CONFIG_LIBDIR": str(tmp_path / "none")} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_client_needs_no_libfuse_and_no_daemon(tmp_path: Path) -> None:
    done = build(tmp_path, KVFS_CLIENT="1")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith("+client-py3-none-any.whl")  # for any machine: nothing compiled
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(opened.read(metadata))
    needed = [line for line in said.get_all("Requires-Dist", ()) if "extra ==" not in line]
    assert needed == ["xxhash>=3.4"]
    assert not [name for name in names if name.endswith((".so", "entry_points.txt"))]

    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        f"sys.modules.update(dict.fromkeys({ABSENT!r}))\n"  # None: importing it is an ImportError
        "import kvfs.prefix, kvfs.errors, kvfs.client\n"
        "print(kvfs.client.__file__)"
    )
    run = (sys.executable, "-P" if sys.version_info >= (3, 11) else "-I", "-c", program, str(wheel))
    found = subprocess.run(run, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(str(wheel))


def test_installed_pages_have_no_dead_link(tmp_path: Path) -> None:
    source, library = tmp_path / "source", tmp_path / "library"
    ignored = shutil.ignore_patterns(".*", "tests", "scripts", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = (sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", library)
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    share = library / "kvfs" / "share"
    links = 0
    for page in share.rglob("*.md"):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.relative_to(share)}: {link}"
                links += 1
    assert links > 100
    readme = (share / "README.md").read_text()
    assert "](ARCHITECTURE.md)" in readme
    assert "](examples/chat.py)" in readme
    assert "](CONTRIBUTING.md)" not in readme


@pytest.mark.slow
def test_failed_build_names_the_missing_packages(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode != 0
    assert "apt-get install libfuse3-dev" in done.stderr
    assert "KVFS_CLIENT=1" in done.stderr


@pytest.mark.slow
def test_unknown_kvfs_client_value_is_refused(tmp_path: Path) -> None:
    done = build(tmp_path, KVFS_CLIENT="yes")
    assert done.returncode != 0
    assert "KVFS_CLIENT=yes: expected 1 for the library alone, or 0 for all of kvfs" in done.stderr

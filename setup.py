"""What is installed: all of kvfs, or what runs in an engine's process; the rest is in setup.cfg.

The C extension is compiled against the libfuse of this machine, so the flags come from pkg-config.
libfuse 3.14 is the first with fuse_session_custom_io, without which kvfs cannot exist.

An engine's container has no libfuse, and needs none: with KVFS_CLIENT=1 in the environment nothing
is compiled, only what `kvfs.client` and `kvfs.connectors` import is required (torch comes with the
engine), and there is no command `kvfs`. The version says so: 0.1.0+client.

The documentation, the examples and mount/ are in the package below `kvfs/share`, for users and
`kvfs setup`. Links to what is in a checkout only become text there.
KVFS_BUNDLE=DIRECTORY puts the modules of this directory into `kvfs/bundled`: scripts/build-wheel.sh
gives pyfuse3, which PyPI has as source only, so that a machine of users needs no compiler.
"""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

LIBFUSE = "3.14"
CLIENT_REQUIRES = ["xxhash>=3.4"]
REQUIRES = [
    *CLIENT_REQUIRES,
    "blosc>=1.11.4",
    "boto3>=1.36",
    "click>=8.2",
    "msgpack>=1.1",
    "prometheus_client>=0.21",
    "pyfuse3==3.5.*",
    "rich>=13",
    "rocksdict>=0.3.29",
    'tomli>=2.0; python_version < "3.11"',
    "trio>=0.27",
    "trio-parallel>=1.3",
]
SHARED = ("mount", "docs", "examples")
PAGES = ("README.md", "ARCHITECTURE.md", "SEMANTICS.md", "CHANGELOG.md")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)[^)]*\)")
BUNDLE = os.environ.get("KVFS_BUNDLE", "")
CLIENT_ONLY = "to use a mount from an engine's process, nothing is compiled: set KVFS_CLIENT=1"


def pkg_config(*arguments: str) -> list[str]:
    """Return what pkg-config says about fuse3; end the build with the cure if it cannot."""
    try:
        done = subprocess.run(
            ["pkg-config", *arguments, f"fuse3 >= {LIBFUSE}"],
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError:
        sys.exit(
            "kvfs needs pkg-config to find libfuse: apt-get install pkg-config libfuse3-dev; "
            + CLIENT_ONLY
        )
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"kvfs needs the headers of libfuse >= {LIBFUSE}: apt-get install libfuse3-dev "
            f"(Debian 12, Ubuntu 24.04 or newer have it); {CLIENT_ONLY}. "
            f"{' '.join(error.stderr.split())}"
        )
    return done.stdout.split()


class BuildPackage(build_py):
    """The modules, what users read, and the bundle. An installation in place needs no copies."""

    def run(self) -> None:
        """Build as setuptools does, then copy."""
        super().run()
        if not self.editable_mode:
            for directory in SHARED:
                self._copy(directory, os.path.join("share", directory))
            share = Path(self.build_lib, "kvfs", "share")
            for page in PAGES:
                shutil.copy(page, share / page)
            for made in share.rglob("*.md"):
                made.write_text(LINK.sub(partial(_existing, made.parent), made.read_text()))
            if BUNDLE:
                self._copy(BUNDLE, "bundled")

    def _copy(self, source: str, name: str) -> None:
        target = os.path.join(self.build_lib, "kvfs", name)
        shutil.rmtree(target, ignore_errors=True)  # of a build before
        shutil.copytree(
            source, target, ignore=shutil.ignore_patterns("__pycache__", "*.c", "*.pyx")
        )


def _existing(directory: Path, link: "re.Match[str]") -> str:
    """Return a link of a page; its text alone if the target is in a checkout only."""
    return link[0] if (directory / link[2]).exists() else link[1]


def whole() -> dict[str, Any]:
    """Daemon, commands and library."""
    extension = Extension(
        "kvfs.fuse._passthrough",
        ["kvfs/fuse/_passthrough.c", "kvfs/fuse/_fast_open.c", "kvfs/fuse/_fast_lookup.c"],
        depends=["kvfs/fuse/_session.h", "kvfs/fuse/_set.h"],
        extra_compile_args=["-Wall", "-Wextra", *pkg_config("--cflags")],
        extra_link_args=pkg_config("--libs"),
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_py": BuildPackage},
        "install_requires": [one for one in REQUIRES if not (BUNDLE and one.startswith("pyfuse3"))],
        "entry_points": {"console_scripts": ["kvfs = kvfs.cli:main"]},
    }


def client() -> dict[str, Any]:
    """The library alone, for any machine."""
    return {
        "install_requires": CLIENT_REQUIRES,
        "options": {"egg_info": {"tag_build": "+client"}},
    }


chosen = os.environ.get("KVFS_CLIENT", "")
if chosen not in {"", "0", "1"}:
    sys.exit(f"KVFS_CLIENT={chosen}: expected 1 for the library alone, or 0 for all of kvfs")
setup(**(client() if chosen == "1" else whole()))

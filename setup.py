"""The C extension; everything else about the package is in setup.cfg.

It is compiled against the libfuse of this machine, so the flags come from pkg-config. libfuse 3.14
is the first with fuse_session_custom_io, without which kvfs cannot exist.
"""

import subprocess
import sys

from setuptools import Extension, setup

LIBFUSE = "3.14"


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
        sys.exit("kvfs needs pkg-config to find libfuse: apt-get install pkg-config libfuse3-dev")
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"kvfs needs the headers of libfuse >= {LIBFUSE}: apt-get install libfuse3-dev "
            f"(Debian 12, Ubuntu 24.04 or newer have it). {' '.join(error.stderr.split())}"
        )
    return done.stdout.split()


setup(
    ext_modules=[
        Extension(
            "kvfs.fuse._passthrough",
            ["kvfs/fuse/_passthrough.c"],
            extra_compile_args=["-Wall", "-Wextra", *pkg_config("--cflags")],
            extra_link_args=pkg_config("--libs"),
        )
    ]
)

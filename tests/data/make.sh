#!/bin/bash
# Makes nvme-closed.tar.xz and nvme-killed.tar.xz here: an NVMe directory as a version of kvfs leaves
# it at an unmount, and as it is while that version serves (the image of a crash).
#
#     tests/data/make.sh PYTHON      PYTHON: the interpreter of an environment with that version
set -euo pipefail
kvfs="$(realpath -s "$1") -m kvfs"
here=$(realpath "$(dirname "$0")")
work=$(mktemp -d)
mnt=$work/mnt nvme=$work/nvme
mkdir "$mnt" "$nvme"
trap '$kvfs umount --now "$mnt" 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work"

$kvfs mount "$mnt" -o "ram=64M,nvme=$nvme,nvme_size=256M,log=$work/log"
$kvfs ns create "$mnt/kv" quota_hard=64M eviction=lru compression=nvme
$kvfs ns create "$mnt/tree" prefix=on
python3 "$here/fill.py" "$mnt"
$kvfs pin "$mnt/kv/pinned"
$kvfs evict "$mnt"
cp --archive "$nvme" "$work/killed"
$kvfs umount "$mnt"

pack() { # directory, name
    rm -f "$1/catalog.ballast" "$1"/catalog/LOG*
    tar --format=pax --sort=name --sparse -C "$1" -cJf "$here/$2.tar.xz" .
}
pack "$nvme" nvme-closed
pack "$work/killed" nvme-killed

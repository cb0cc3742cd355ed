#!/bin/bash
# From a checkout to a working kvfs: installs what is missing, mounts with sizes fitted to this
# machine, proves that what is written is read back, and says what is on. Run it again at any time.
#
#     scripts/up.sh [MOUNTPOINT]      default /mnt/kv; as root
#
# KVFS_OPTIONS replaces the options chosen here, for example KVFS_OPTIONS=ram=64G,nvme=/data/kvfs.
set -euo pipefail
cd "$(dirname "$0")/.."
usage="usage: scripts/up.sh [MOUNTPOINT], default /mnt/kv"
case ${1:-} in
-h | --help)
    echo "$usage"
    exit 0
    ;;
esac
mountpoint=${1:-/mnt/kv}
kvfs=$PWD/.venv/bin/kvfs
MIB=$((1 << 20))

fail() {
    echo "up: $*" >&2
    exit 1
}
case $mountpoint in
-*) fail "unknown option $mountpoint; $usage" ;;
esac
[ $# -lt 2 ] || fail "$2 is one word too many; $usage"
[ "$(id -u)" -eq 0 ] ||
    fail "run it as root; without: scripts/install.sh, then .venv/bin/kvfs mount DIRECTORY -o ..."
case $mountpoint in
/*) ;;
*) mountpoint=$PWD/$mountpoint ;;
esac
scripts/install.sh

# A quarter of the memory that is free now; half of the disk that is free or already kvfs' own.
fitted_options() {
    local ram nvme place type free held size
    ram=$(.venv/bin/python -c 'from kvfs import runtime; print(runtime.available_memory() // 4)')
    if [ "$ram" -ge $((64 * MIB)) ]; then ram=$((ram / MIB))M; else ram=16M; fi
    nvme=/var/lib/kvfs/$(.venv/bin/python -c \
        'import sys; from kvfs import runtime; print(runtime.escape(runtime.canonical(sys.argv[1])))' \
        "$mountpoint")
    place=/var/lib
    [ ! -d "$nvme" ] || place=$nvme
    type=$(stat --file-system --format=%T "$place")
    free=$(df --output=avail --block-size=1 "$place" | tail -n 1)
    held=0
    [ ! -d "$nvme" ] || held=$(du --summarize --block-size=1 "$nvme" | cut -f 1)
    size=$(((free + held) / 2))
    if [ "$type" = overlayfs ]; then
        echo "up: $place is on overlayfs: no NVMe tier; give one with KVFS_OPTIONS" >&2
        echo "ram=$ram"
    elif [ "$size" -lt $((1024 * MIB)) ]; then
        echo "up: less than 2 GiB free in $place: no NVMe tier" >&2
        echo "ram=$ram"
    else
        mkdir -p "${nvme%/*}"
        echo "ram=$ram,nvme=${nvme//,/\\,},nvme_size=$((size / MIB))M"
    fi
}

# findmnt reads the kernel's table; it asks no daemon, which may be dead.
type=$(findmnt --noheadings --output FSTYPE --mountpoint "$mountpoint" | tail -n 1) || type=
case $type in
fuse.kvfs) echo "up: $mountpoint is mounted already" >&2 ;;
'')
    mkdir -p "$mountpoint"
    # allow_other: engines of other users, as far as file modes permit, and exports over NFS.
    "$kvfs" mount -o "${KVFS_OPTIONS-allow_other,$(fitted_options)}" -- "$mountpoint"
    ;;
*) fail "$mountpoint is a mount of type $type; choose another directory" ;;
esac

proof=$(mktemp)
object=$(mktemp "$mountpoint/.proof-XXXXXX")
trap 'rm -f "$proof" "$object"' EXIT
head -c $((8 * MIB)) /dev/urandom >"$proof"
cat "$proof" >"$object"
cmp "$proof" "$object" || fail "the file that was read back differs; see $kvfs status $mountpoint"
echo "up: wrote a random object of 8 MiB and read it back: equal" >&2

"$kvfs" status "$mountpoint"
cat <<END

An engine:   $kvfs ns create $mountpoint/lmcache --for lmcache-fs    # prints what to paste
Everything:  $kvfs --help
Stop:        $kvfs umount $mountpoint
END

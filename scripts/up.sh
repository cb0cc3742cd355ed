#!/bin/bash
# From a checkout to a working kvfs: installs what is missing, mounts with sizes fitted to this
# machine, proves that what is written is read back, and says what is on. Run it again at any time.
#
#     scripts/up.sh [--pool] [MOUNTPOINT]      default /mnt/kv; as root
#
# --pool makes the mount a node of a pool, with an index on this machine: docs/pool.md. KVFS_OPTIONS
# replaces the options chosen here, for example KVFS_OPTIONS=ram=64G,nvme=/data/kvfs. KVFS_POOL_PORT
# is the port of the index, 6379.
set -euo pipefail
cd "$(dirname "$0")/.."
usage="usage: scripts/up.sh [--pool] [MOUNTPOINT], default /mnt/kv"
pool=
case ${1:-} in
-h | --help)
    echo "$usage"
    exit 0
    ;;
--pool)
    pool=pool
    shift
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
scripts/install.sh $pool

index_port=${KVFS_POOL_PORT:-6379}
on_index() { redis-cli -h 127.0.0.1 -p "$index_port" "$@" 2>&1; }

# The index of this machine. Nothing on a disk: each node announces its objects again. An index that
# is there already stays, be it another mount's or a service.
start_index() {
    local told
    told=$(on_index ping) || true
    case $told in
    PONG) return ;;
    NOAUTH*)
        fail "the index at 127.0.0.1:$index_port wants a password: leave out --pool, and give" \
            "pool= and pool_credentials= with KVFS_OPTIONS"
        ;;
    esac
    runuser -u nobody -- redis-server --bind 127.0.0.1 --port "$index_port" --save '' \
        --appendonly no --daemonize yes --dir / --pidfile '' >/dev/null
    for _ in $(seq 100); do
        [ "$(on_index ping)" != PONG ] || return 0
        sleep 0.1
    done
    fail "no index answers at 127.0.0.1:$index_port: is the port free?" \
        "KVFS_POOL_PORT gives another one"
}

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

[ -z "$pool" ] || start_index

# findmnt reads the kernel's table; it asks no daemon, which may be dead.
type=$(findmnt --noheadings --output FSTYPE --mountpoint "$mountpoint" | tail -n 1) || type=
case $type in
fuse.kvfs) echo "up: $mountpoint is mounted already" >&2 ;;
'')
    mkdir -p "$mountpoint"
    # allow_other: engines of other users, as far as file modes permit, and exports over NFS.
    options=${KVFS_OPTIONS-allow_other,$(fitted_options)}
    options=$options${pool:+,pool=redis://127.0.0.1:$index_port/kv}
    "$kvfs" mount -o "$options" -- "$mountpoint"
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
[ -z "$pool" ] || "$kvfs" pool "$mountpoint"
cat <<END

An engine:   $kvfs ns create $mountpoint/lmcache --for lmcache-fs    # prints what to paste
Everything:  $kvfs --help
Stop:        $kvfs umount $mountpoint
END
[ -z "$pool" ] || echo "Its index:   redis-cli -p $index_port shutdown nosave    # after all mounts"

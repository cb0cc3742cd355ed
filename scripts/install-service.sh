#!/bin/bash
# Makes kvfs a service of systemd: the unit, /usr/local/bin/kvfs for it and, with a mount point, the
# file with its options, which is never overwritten. After scripts/install.sh, as root; run it again
# at any time. It starts nothing: it says how.
#
#     scripts/install-service.sh [MOUNTPOINT]
#
# DESTDIR=DIRECTORY installs below that instead, for an image.
set -euo pipefail
cd "$(dirname "$0")/.."
root=${DESTDIR:-}
kvfs=$PWD/.venv/bin/kvfs

say() { echo "install-service: $*" >&2; }
fail() {
    say "$*"
    exit 1
}
[ -x "$kvfs" ] || fail "$kvfs is not there: run scripts/install.sh first"
command -v systemd-escape >/dev/null || fail "there is no systemd here; kvfs mount -f serves others"

mkdir -p "$root/etc/systemd/system" "$root/etc/kvfs" "$root/usr/local/bin"
link=$root/usr/local/bin/kvfs
if [ -e "$link" ] && [ ! -L "$link" ]; then
    say "$link is not ours and is left alone; the service runs it"
else
    ln -sfn "$kvfs" "$link"
fi
install -m 0644 mount/systemd/kvfs@.service "$root/etc/systemd/system/"
[ -n "$root" ] || [ ! -d /run/systemd/system ] || systemctl daemon-reload

if [ $# -gt 0 ]; then
    case $1 in
    /*) ;;
    *) fail "mount point $1: expected an absolute path" ;;
    esac
    name=$(systemd-escape --path "$1")
    options=$root/etc/kvfs${1%/}.conf
    if [ -e "$options" ]; then
        say "$options is there and is left alone"
    else
        install -D -m 0600 mount/systemd/kvfs.conf.sample "$options"
        say "now put your options into $options"
    fi
    mkdir -p "$root$1"
    say "then: systemctl enable --now 'kvfs@$name.service'"
fi

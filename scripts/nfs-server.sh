#!/usr/bin/env bash
# A real NFS server for tests and benchmarks: nfs-ganesha from Debian, on loopback, without systemd.
# Of a mount of kvfs it is the one that `kvfs export --start` runs, with NFSv3; of any other directory
# it gets the same configuration. Not for anybody else: clients' root stays root.
#
#   nfs-server.sh install                  apt-get the packages (root; ~5 MB)
#   nfs-server.sh start  DIR PATH PORT     export PATH; DIR has what belongs to it; PORT+1 is mountd's
#   nfs-server.sh kill   DIR               kill -9; start it again with start
#   nfs-server.sh stop   DIR               end it, and the rpcbind that it started
#   nfs-server.sh status DIR               its pid; exit 0 only if it runs
#
# A client needs no rpcbind: nfs-ls 'nfs://127.0.0.1PATH?version=3&nfsport=PORT&mountport=PORT+1'.
# But ganesha does for NFSv3: the machine's is used, or one is started.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "nfs-server: $*" >&2; }
die() { say "$*"; exit 1; }
PYTHON=${PYTHON:-.venv/bin/python}
PKGS=(nfs-ganesha nfs-ganesha-vfs rpcbind libnfs-utils)
need() { local b; for b in ganesha.nfsd rpcbind nfs-ls; do command -v "$b" >/dev/null || return 1; done
  compgen -G '/usr/lib*/*/ganesha/libfsalvfs.so' >/dev/null || compgen -G '/usr/lib*/ganesha/libfsalvfs.so' >/dev/null; }

install() {
  need && return 0
  [ "$(id -u)" = 0 ] || die "install needs root"
  say "installing ${PKGS[*]}"
  # RUNLEVEL=1 keeps Debian's maintainer scripts from starting daemons
  { RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${PKGS[@]}" ||
    { apt-get update -q && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${PKGS[@]}"; }; } >&2
  need || die "packages installed, commands missing"
}

setdir() { [ -n "${1:-}" ] || die "DIR missing"; DIR=$(readlink -m -- "$1")
  case $DIR in *[[:space:]]*) die "no spaces in DIR";; /|/tmp|/var|/usr|/home|/root) die "refusing DIR $DIR";; esac; }
pid_of() { # of the process that FILE names, if that is still a COMMAND
  local p; p=$(cat "$1" 2>/dev/null) && [ -n "$p" ] && [ "$(cat "/proc/$p/comm" 2>/dev/null)" = "$2" ] && echo "$p"; }
server() { # ganesha's process
  local p conf; conf=$(cat "$DIR/conf" 2>/dev/null) || return 1
  p=$(pid_of "${conf%/*}/pid" ganesha.nfsd) && tr '\0' '\n' <"/proc/$p/cmdline" | grep -qxF -- "$conf" && echo "$p"; }
gone() { local i; for ((i = 0; i < $2; i++)); do kill -0 "$1" 2>/dev/null || return 0; sleep 0.1; done; return 1; }

lock() { exec 9>/run/kvfs-nfs-server.lock; flock -w 120 9 || die "another server starts for too long"; }
unlock() { exec 9>&-; }
with_rpcbind() {
  local i
  if ! rpcinfo_answers; then
    rpcbind -f </dev/null >>"$DIR/rpcbind.log" 2>&1 9>&- &
    echo $! >"$DIR/rpcbind.pid"
    for ((i = 0; i < 300; i++)); do rpcinfo_answers && break; sleep 0.1; done
    rpcinfo_answers || die "rpcbind does not answer, see $DIR/rpcbind.log"
  fi
}
rpcinfo_answers() { "$PYTHON" -c 'import socket
socket.socket(socket.AF_UNIX).connect("/run/rpcbind.sock")' 2>/dev/null; }

start() {
  setdir "${1:-}"; local path=${2:-} port=${3:-}
  [ -d "$path" ] || die "PATH must be a directory"
  [[ $port =~ ^[0-9]+$ ]] && ((port >= 1024 && port <= 65000)) || die "PORT must be 1024..65000"
  need || install
  mkdir -p "$DIR"; server >/dev/null && return 0
  # Until ganesha has registered: another server's stop may end the rpcbind that it has started.
  lock
  with_rpcbind
  "$PYTHON" -m scripts.nfs_server "$path" "$port" "$DIR/conf" >&2 9>&-
  unlock
}

stop() {
  local p
  if p=$(server); then kill "$p"; gone "$p" 300 || { say "ganesha does not stop, kill -9"; kill -9 "$p"; gone "$p" 100; }; fi
  lock
  if p=$(pid_of "$DIR/rpcbind.pid" rpcbind); then kill "$p"; gone "$p" 100 || kill -9 "$p"; fi
  unlock
  rm -f "$DIR/rpcbind.pid"
}

cmd=${1:-}; shift || true
case $cmd in
  install) install ;;
  start) start "$@" ;;
  stop) setdir "${1:-}"; stop ;;
  kill) setdir "${1:-}"; p=$(server) || die "it does not run"; kill -9 "$p"; gone "$p" 100 ;;
  status) setdir "${1:-}"; server ;;
  *) sed -n '2,15p' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2 ;;
esac

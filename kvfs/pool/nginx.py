"""The nginx of a node: it serves the object files of both tiers to the pool's nodes, and no others.

Contract: `Nginx.start` returns when the server serves, or raises ConfigError (nginx is missing or
too old, it cannot listen at the address) or KvfsError. The server reads two folders of files,
without listings, and writes only below its own folder. A path is TIER/FOLDER/INODE.VERSION in
lower-case hexadecimal, without any escape; all else is 404. A file's name is never used again for
other bytes. The clients are those in the networks of `allow`, and with TLS those with a certificate
of the pool's authority. `start` and `stop` wait: call them in a thread. Not for restarts:
`kvfs.core.pool` watches `alive`.

The workers run as `account()`, to which `Tier.let_read` gives the object files, never as root. For
each GET they send a datagram to the socket `reports` (`listen`, `read_report`). They never wait: a
report for which the socket has no room is lost.
"""

import contextlib
import errno
import ipaddress
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvfs import acl, own_files
from kvfs.errors import ConfigError, KvfsError

PROGRAM = "nginx"
PACKAGE = "apt-get install nginx-light"
EXTRA = "pip install 'kvfs[pool]'"  # for the index
ACCOUNTS = ("kvfs-pool", "www-data", "nginx")  # the first that the machine has
OLDEST = (1, 18, 0)
LOGS, KTLS = (1, 19, 5), (1, 21, 4)  # the first with the option -e; that sends files by kernel TLS
START_S, STOP_S, POLL_S = 10.0, 5.0, 0.02

# A worker sends 128 KiB and then lets others run: kernels without preemption do not interrupt
# sendfile(2). With 2 MiB the p99 of opens beside 1 GB/s was 861 and 1,310 us, now 481 and 869 us.
# The error log has only what stops the server. Peers cause the other errors, at any rate.
_CONFIG = """\
# Written by kvfs: changes are lost.
daemon off;
pid {folder}/pid;
error_log {folder}/error.log emerg;
worker_processes {workers};
worker_rlimit_nofile 16384;
{user}events {{
    worker_connections 8192;
}}
http {{
    {reports}
    sendfile on;
    sendfile_max_chunk 128k;
    tcp_nopush on;
    tcp_nodelay on;
    keepalive_timeout 600s;
    keepalive_requests 1000000;
    client_header_timeout 10s;
    reset_timedout_connection on;
    client_max_body_size 1k;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    max_ranges 1;
    merge_slashes off;
    etag off;
    server_tokens off;
    default_type application/octet-stream;
    server {{
        listen {address}{ssl};
{rules}        if ($request_uri !~ "^/({tiers})/[0-9a-f]{{2}}/[0-9a-f]+\\.[0-9a-f]+$") {{
            return 404;
        }}
{locations}        location / {{
            return 404;
        }}
    }}
}}
"""

# `disable_symlinks`: what is below the root of a tier is opened without following a link.
_LOCATION = """\
        location ~ "^/{tier}/(?<file>.+)$" {{
            limit_except GET {{ deny all; }}
            alias {root}/$file;
            disable_symlinks on from={root};
{threads}        }}
"""

_TLS = """\
        ssl_certificate {tls}/cert.pem;
        ssl_certificate_key {tls}/key.pem;
        ssl_client_certificate {tls}/ca.pem;
        ssl_verify_client on;
        ssl_protocols TLSv1.2 TLSv1.3;
"""
_THREADS = "            aio threads;\n"  # a disk that is slow does not stop a worker
_KTLS = "        ssl_conf_command Options KTLS;\n"

_REPORTS = """\
log_format report "$uri $status $body_bytes_sent";
    access_log syslog:server=unix:{path},nohostname,tag=kvfs report;"""
_PLAIN = re.compile(r"(?:[A-Za-z0-9/._@:+~-]|\\x[0-9a-f]{2})+")
_CURES = {
    errno.EADDRINUSE: "another program has it; end that, or give another address",
    errno.EADDRNOTAVAIL: "it is no address of this machine; give one of `ip address`",
    errno.EACCES: "a port below 1024 needs root; give another port",
}
_REPORT = re.compile(rb": /([a-z]+)/[0-9a-f]{2}/([0-9a-f]+\.[0-9a-f]+) (\d{3}) (\d+)$")


class Program(NamedTuple):
    """The nginx of this machine. ktls, threads: whether it was built with them."""

    path: str
    version: tuple[int, ...]
    ktls: bool
    threads: bool


class Report(NamedTuple):
    """One request of a peer: the file of a tier, the status of the reply, and the bytes sent."""

    tier: str
    file: str
    status: int
    sent: int


@dataclass(frozen=True, slots=True)
class Served:
    """The files that a server serves, and its clients.

    address: IP:PORT. roots: the folder of object files of each tier, by its name. allow: networks
    that may read; without it, nobody without a certificate. tls: the folder with ca.pem, cert.pem
    and key.pem. reports: a UNIX socket of datagrams, to which the workers may write.
    """

    address: str
    roots: Mapping[str, Path]
    allow: Sequence[str] = ()
    tls: Path | None = None
    reports: Path | None = None
    user: str = ""
    workers: int = 2

    def config(self, folder: Path, program: Program) -> str:
        """Return the text of nginx.conf. Raises ConfigError."""
        rules = ""
        if self.tls is not None:
            rules = _TLS.format(tls=_word(self.tls)) + (_KTLS if program.ktls else "")
        if self.tls is None or self.allow:
            rules += "".join(f"        allow {_network(net)};\n" for net in self.allow)
            rules += "        deny all;\n"
        locations = ""
        for tier, root in self.roots.items():
            threads = _THREADS if program.threads and tier != "ram" else ""
            locations += _LOCATION.format(tier=tier, root=_word(root), threads=threads)
        reports = "access_log off;"
        if self.reports is not None:
            reports = _REPORTS.format(path=_word(self.reports))
        return _CONFIG.format(
            folder=_word(folder),
            workers=self.workers,
            user=f"user {self.user};\n" if self.user and os.geteuid() == 0 else "",
            reports=reports,
            address=self.address,
            ssl="" if self.tls is None else " ssl",
            rules=rules,
            tiers="|".join(self.roots),
            locations=locations,
        )


class Nginx:
    """The server of one mount; `folder` has its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, served: Served) -> None:
        """Start the server. One that a dead daemon has left goes on if it serves the same."""
        program = installed()
        text = served.config(self.folder, program)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        config, log = self.folder / "nginx.conf", self.folder / "error.log"
        if self._noted() in self.pids and text == own_files.read(config, "its text", "remove it"):
            return
        self.stop()
        own_files.write(config, text)
        log.unlink(missing_ok=True)
        # The daemon answers opens before nginx serves peers.
        nice = ("nice", "-n", str(-os.getpriority(os.PRIO_PROCESS, 0)))
        words = [*nice, program.path, "-c", str(config), "-p", str(self.folder)]
        self._process = subprocess.Popen(
            [*words, "-e", str(log)] if program.version >= LOGS else words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        deadline = time.monotonic() + START_S
        while self._noted() != self._process.pid:  # nginx notes it once it listens
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise _not_started(served, log)
            time.sleep(POLL_S)

    def reload(self) -> None:
        """Have the server read its certificates again. Requests under way go on."""
        if self.alive:
            _signal(self._process.pid if self._process else self._noted(), signal.SIGHUP)

    @property
    def alive(self) -> bool:
        """Whether the master runs: its workers serve on without it, and nobody replaces them."""
        if self._process is not None:
            return self._process.poll() is None
        return self._noted() in self.pids

    @property
    def pids(self) -> list[int]:
        """The processes of the server, also of one that a former daemon has started.

        They are the session of the master. After its death its workers serve on.
        """
        master = self._process.pid if self._process is not None else self._noted()
        words = _words(master)
        if not master or (words and os.fsencode(self.folder / "nginx.conf") not in words):
            return []
        found = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
        return [pid for pid in found if _is_nginx_of(pid, master)]

    def stop(self) -> None:
        """End the server; requests under way are cut off, and are misses for the peers."""
        deadline = time.monotonic() + STOP_S
        while pids := self.pids:
            late = time.monotonic() > deadline
            for pid in pids:
                _signal(pid, signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(POLL_S)
            if self._process is not None:
                self._process.poll()
        if self._process is not None:
            self._process.wait()
        self._process = None
        (self.folder / "pid").unlink(missing_ok=True)

    def _noted(self) -> int:
        """Return the number of the process that a server has noted; 0 for none. ConfigError."""
        text = own_files.read(self.folder / "pid", "the number of a process", "remove it") or ""
        return int(text) if text.strip().isdecimal() else 0


def installed() -> Program:
    """Return the nginx of this machine. Raises ConfigError if it is missing, or too old."""
    path = shutil.which(PROGRAM) or shutil.which(PROGRAM, path="/usr/sbin:/usr/local/sbin")
    if path is None:
        raise ConfigError(f"pool: {PROGRAM} is missing, peers cannot read from here: {PACKAGE}")
    told = subprocess.run([path, "-V"], capture_output=True, text=True, check=False).stderr
    found = re.search(r"nginx/(\d+)\.(\d+)\.(\d+)", told)
    version = tuple(int(number) for number in found.groups()) if found else ()
    if version < OLDEST:
        said = told.strip().partition("\n")[0] or "no nginx"
        raise ConfigError(
            f"pool: {path} is {said}, expected {OLDEST[0]}.{OLDEST[1]} or newer: {PACKAGE}"
        )
    ktls = version >= KTLS and re.search(r"built with OpenSSL [3-9]", told) is not None
    return Program(path, version, ktls, "--with-threads" in told)


def account() -> pwd.struct_passwd:
    """Return the user of the workers: this one, or for root one of ACCOUNTS. ConfigError."""
    if os.geteuid():
        return pwd.getpwuid(os.geteuid())
    for name in ACCOUNTS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise ConfigError(
        f"pool: {PROGRAM} needs a user, expected one of {', '.join(ACCOUNTS)}: "
        f"useradd --system --shell /usr/sbin/nologin {ACCOUNTS[0]}"
    )


def listen(path: Path, uid: int) -> socket.socket:
    """Make the socket for reports, to which only that user can write. Raises OSError."""
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        made.bind(str(path))
        path.chmod(0o600)
        if uid != os.geteuid():
            acl.allow(path, uid, acl.WRITE)
            for folder in path.parents:
                if not acl.passes(folder, uid):
                    acl.allow(folder, uid, acl.PASS)
    except BaseException:
        made.close()
        raise
    return made


def read_report(datagram: bytes) -> Report | None:
    """Return what a datagram reports; None if it is no report of a file."""
    found = _REPORT.search(datagram)
    if found is None:
        return None
    tier, file, status, sent = found.groups()
    return Report(tier.decode(), file.decode(), int(status), int(sent))


def _word(path: Path) -> str:
    """Return a path as a word of nginx.conf. Raises ConfigError: nginx has no escape for a `$`."""
    text = str(path)
    if not _PLAIN.fullmatch(text):
        raise ConfigError(
            f"pool: {PROGRAM} cannot serve {text!a}: expected a path of letters, digits and "
            "/ . _ @ : + ~ - only; give another directory"
        )
    return text


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        raise ConfigError(
            f"pool_allow={text}: expected networks such as 10.0.0.0/8, joined by +"
        ) from None


def _not_started(served: Served, log: Path) -> KvfsError:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if found := re.search(r"bind\(\) to \S+ failed \((\d+): ([^)]+)\)", line):
            cure = _CURES.get(int(found[1]), "give another address")
            return ConfigError(
                f"pool_address={served.address}: {PROGRAM} cannot listen there ({found[2]}): {cure}"
            )
    said = f"{lines[-1]} (see {log})" if lines else "it said nothing"
    return KvfsError(f"{PROGRAM} does not serve {served.address}: {said}")


def _signal(pid: int, how: signal.Signals) -> None:
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        return


def _words(pid: int) -> bytes:
    """Return the command line of a process; empty if there is none, or it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _is_nginx_of(pid: int, session: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    name, _, rest = stat.partition("(")[2].rpartition(")")
    state, _, _, of_session = rest.split()[:4]
    return name == PROGRAM and int(of_session) == session and state not in "ZX"

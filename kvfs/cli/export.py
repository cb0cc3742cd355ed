"""`kvfs export`: the configuration of an NFS server for a mount, printed, or run.

Everything is checked before anything is done. Not for other servers of the machine, nor for its
firewall.
"""

import ipaddress
from pathlib import Path
from uuid import UUID

import click

from kvfs import own_files
from kvfs.cli import kvfs_mount, mountpoint_argument, printable, unwritten
from kvfs.control import request
from kvfs.errors import ConfigError, ControlError
from kvfs.nfs.export import (
    EVERYWHERE,
    LOOPBACK,
    MOUNTD_PORT,
    NFS_PORT,
    Export,
    NfsServer,
    is_ours,
    networks,
    owner,
)
from kvfs.nfs.servers import Ganesha, KernelNfsServer

PORT = click.IntRange(1, 65535)


@click.command
@mountpoint_argument
@click.option("--ganesha", is_flag=True, help="Configure nfs-ganesha.  [default]")
@click.option("--knfsd", is_flag=True, help="Configure the kernel's server: /etc/exports.")
@click.option(
    "--allow",
    multiple=True,
    default=LOOPBACK,
    metavar="NET",
    help=(
        "Network or host of clients that may mount it, such as 10.1.0.0/16 "
        "(repeatable).  [default: this machine]"
    ),
)
@click.option("--read-only", is_flag=True, help="Let clients read only.")
@click.option(
    "--no-root-squash",
    "keep_root",
    multiple=True,
    metavar="NET",
    help=(
        "Do not squash root for clients in this network, which is part of --allow "
        "(repeatable). Root of all other clients maps to nobody."
    ),
)
@click.option("--all-as", metavar="UID:GID", help="Map every user of every client to this user.")
@click.option("--any-port", is_flag=True, help="Accept clients from ports above 1023.")
@click.option("--v3", is_flag=True, help="Serve NFSv3 as well. Needs rpcbind (ganesha).")
@click.option("--listen", metavar="ADDRESS", help="Address for ganesha.  [default: by --allow]")
@click.option("--port", type=PORT, default=NFS_PORT, show_default=True, help="Port of ganesha.")
@click.option(
    "--mountd-port",
    type=PORT,
    default=MOUNTD_PORT,
    show_default=True,
    help="Port of ganesha's mountd, with --v3.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the configuration to this file."
)
@click.option("--start", is_flag=True, help="Start ganesha with it. docs/nfs.md lists the files.")
@click.option("--stop", is_flag=True, help="Stop the ganesha of --start.")
def command(
    mountpoint: Path,
    allow: tuple[str, ...],
    keep_root: tuple[str, ...],
    all_as: str | None,
    listen: str | None,
    output: Path | None,
    *,
    ganesha: bool,
    knfsd: bool,
    read_only: bool,
    any_port: bool,
    v3: bool,
    port: int,
    mountd_port: int,
    start: bool,
    stop: bool,
) -> None:
    """Print an NFS server configuration, or --start one."""
    if start + stop + (output is not None) > 1:
        raise ConfigError("--start, --stop and --output exclude each other: give one of them")
    if ganesha and knfsd:
        raise ConfigError("--ganesha and --knfsd exclude each other: give one of them")
    if stop:
        _stop(mountpoint, knfsd=knfsd)
        return
    server, kernel = Ganesha(mountpoint), KernelNfsServer(mountpoint)
    export = Export(
        mountpoint,
        _fsid(mountpoint),
        networks("--allow", allow),
        networks("--no-root-squash", keep_root),
        None if all_as is None else owner("--all-as", all_as),
        read_only=read_only,
        any_port=any_port,
    )
    address = _address(listen) or ("127.0.0.1" if export.private else EVERYWHERE)
    mountd_port = mountd_port if v3 else 0
    if v3 and port == mountd_port:
        raise ConfigError(f"--port and --mountd-port are both {port}: expected two different ports")
    if not start:
        text = (
            export.line()
            if knfsd
            else export.ganesha(NfsServer(address, port, mountd_port, server.folder))
        )
        _give(text, output)
        return
    where = printable(mountpoint)
    if knfsd:
        fresh = kernel.start(export)
        told = f"by the kernel's server: {kernel.file}"
    else:
        fresh = server.start(export, address, port, mountd_port)
        told = (
            f"at {address}:{port} (NFSv4{' and NFSv3' * v3}) by process {server.pid()}, "
            f"log {server.log}"
        )
    click.echo(f"{where} is exported {'' if fresh else 'already '}{told}")


def _stop(mountpoint: Path, *, knfsd: bool) -> None:
    where = printable(mountpoint)
    if knfsd:
        KernelNfsServer(mountpoint).stop()
    elif not (ganesha := Ganesha(mountpoint)).stop():
        click.echo(f"{where} was no longer exported: ganesha.nfsd had ended, see {ganesha.log}")
        return
    click.echo(f"{where} is no longer exported")


def _fsid(mountpoint: Path) -> UUID:
    """Return the fsid of a mount that an NFS server may serve. Raises ConfigError."""
    mount = kvfs_mount(mountpoint)
    if "allow_other" not in mount.super_options:
        raise ConfigError(
            f"{mountpoint} is for one user only, because it was mounted without allow_other: "
            "mount it with -o allow_other, then export it"
        )
    status = request(mountpoint, "status")
    if "identity" not in status:
        raise ControlError(
            f"{mountpoint} is served by an older kvfs ({status['version']}), which has no identity "
            f"for NFS: run kvfs upgrade {mountpoint} first"
        )
    return UUID(status["identity"])


def _address(text: str | None) -> str:
    if text is None:
        return ""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ConfigError(f"--listen {text}: expected an address such as 192.0.2.7") from None


def _give(text: str, output: Path | None) -> None:
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        found = b""
        if output.is_file():
            with output.open("rb") as file:
                found = file.read(own_files.LIMIT)  # longer than the configuration of any server
        if found and not is_ours(found):
            raise ConfigError(
                f"--output {output} exists, and kvfs export did not write it: give another file, "
                "or remove this one first"
            )
        output.write_text(text)
    except OSError as error:
        raise unwritten(f"--output {output}", error) from None

"""Certificates for tests of the pool, by openssl: each authority with one certificate."""

import subprocess
from pathlib import Path


def authority(folder: Path, *, signed_by: Path | None = None) -> Path:
    """Make ca.pem, cert.pem and key.pem for 127.0.0.1 and localhost in a folder, and return it.

    signed_by: the folder of another authority, which signs the certificate instead.
    """
    folder.mkdir(parents=True)
    signer = signed_by or folder
    if signed_by is None:
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", f"/CN=authority {folder.name}"),
            *("-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.pem")),
        )
    _openssl(
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-subj", "/CN=node", "-keyout", str(folder / "key.pem"), "-out", str(folder / "csr")),
    )
    names = folder / "names"
    names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    _openssl(
        *("x509", "-req", "-in", str(folder / "csr"), "-days", "2", "-extfile", str(names)),
        *("-CA", str(signer / "ca.pem"), "-CAkey", str(signer / "ca.key"), "-CAcreateserial"),
        *("-out", str(folder / "cert.pem")),
    )
    if signed_by is not None:
        (folder / "ca.pem").write_bytes((signer / "ca.pem").read_bytes())
    return folder


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)

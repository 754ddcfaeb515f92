"""A certificate of a test's own and its key, made by openssl."""

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class TlsFiles(NamedTuple):
    """PEM files."""

    cert: Path
    key: Path

    def trusting(self) -> ssl.SSLContext:
        """A client's context that trusts this certificate and no other."""
        return ssl.create_default_context(cafile=self.cert)


def make_tls_files(folder: Path, *names: str) -> TlsFiles:
    """Make a self-signed certificate for 127.0.0.1 and these names; without openssl the test is skipped."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl; on Debian and Ubuntu: apt install openssl")
    files = TlsFiles(folder / "fullchain.pem", folder / "privkey.pem")
    alternatives = ",".join(["IP:127.0.0.1", *(f"DNS:{name}" for name in names)])
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=memd", "-addext", f"subjectAltName={alternatives}"]
    command += ["-keyout", str(files.key), "-out", str(files.cert)]
    subprocess.run(command, check=True, capture_output=True)
    return files

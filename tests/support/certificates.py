"""Certificates that nobody but themselves vouches for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from orchestray.serving.config.schema import TlsSection

OPENSSL = shutil.which("openssl")
NEEDS_OPENSSL = pytest.mark.skipif(OPENSSL is None, reason="no openssl is installed: apt-get install openssl")


def written_pair(folder: Path) -> TlsSection:
    """Write a self-signed certificate for 127.0.0.1, and its key."""
    made = TlsSection(certificate=str(folder / "certificate.pem"), key=str(folder / "key.pem"))
    subprocess.run(
        [
            *(str(OPENSSL), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"),
            *("-out", str(made.certificate), "-keyout", str(made.key)),
        ],
        check=True,
        capture_output=True,
    )
    return made

"""Certificates of the run's own HTTPS endpoints, and the authorities that its parts trust."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Protocol

from outloop.buffer.errors import SettingsError

TRUSTED = "SSL_CERT_FILE"
"""Environment variable that names the authorities which clients of TLS trust."""


class TlsSettings(Protocol):
    """`[router]` or `[server]`."""

    @property
    def tls_cert_file(self) -> Path | None: ...

    @property
    def tls_key_file(self) -> Path | None: ...


def trust_authorities(ca_file: Path | None) -> None:
    """Have this process, and those that it starts, trust run.tls_ca_file, where it is here.

    To be called before aiohttp is imported, which makes its contexts then.
    """
    if ca_file is not None and ca_file.is_file():
        os.environ[TRUSTED] = str(ca_file.absolute())


def check_certificate(
    section: str, settings: TlsSettings, *, ca_file: Path | None = None, host: str | None = None
) -> None:
    """Refuse a certificate with which no client of the run would get through; none is right.

    Args:
        section: of the settings, for the error.
        ca_file: run.tls_ca_file; None: what this process trusts is not compared with.
        host: the name or address under which clients reach the endpoint; None: not known yet.

    Raises:
        SettingsError: certificate or key cannot be read, do not belong together, are expired, not
            signed by `ca_file`, or are for other names than `host`.
    """
    cert, key = settings.tls_cert_file, settings.tls_key_file
    if cert is None or key is None:
        return
    named = f"{section}.tls_cert_file={str(cert)!r}"
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(named, f"{section}.tls_key_file={str(key)!r}", server, cert, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = host is not None
    # Without an authority to compare with, the certificate itself is the one.
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(cert if ca_file is None else ca_file)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(
            f"run.tls_ca_file={str(ca_file)!r} cannot be read ({error}); give the certificates of "
            "authorities in PEM"
        ) from error
    try:
        _shake_hands(server, client, host)
    except ssl.SSLCertVerificationError as error:
        raise SettingsError(
            f"{named} would be refused by the run's own clients: {error.verify_message}. Give one "
            "that is valid now, signed by run.tls_ca_file, and made for the address that clients "
            "use, as a subjectAltName"
        ) from error


def _load(named: str, named_key: str, server: ssl.SSLContext, cert: Path, key: Path) -> None:
    for name, path in ((named, cert), (named_key, key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise SettingsError(f"{name} cannot be read ({error}); give a file in PEM") from error
    try:
        # Without a function OpenSSL would ask the terminal.
        server.load_cert_chain(cert, key, password=lambda: "")
    except ssl.SSLError as error:
        raise SettingsError(
            f"{named} and {named_key} cannot be used ({error}); give a certificate, with its chain "
            "behind it, and its own key without a passphrase, both in PEM"
        ) from error


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str | None) -> None:
    """A handshake of both in memory.

    Raises:
        ssl.SSLCertVerificationError: the client refuses the server.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue

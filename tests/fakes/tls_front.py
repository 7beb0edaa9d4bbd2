"""A TLS front for a Redis that speaks none: real handshakes, then bytes to and from its socket.

Owns: a certificate authority, certificates for 127.0.0.1 and for a client, and the listener. Does
not own: what passes. Invariant: without a client certificate of this authority nobody gets through.
"""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import threading
from pathlib import Path


class TlsFront:
    """Listens on 127.0.0.1 in a thread of its own and forwards to a Unix socket."""

    def __init__(self, folder: Path, socket: str) -> None:
        self._folder = folder
        self._socket = socket
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.port = 0
        self.ca_file = make_authority(folder)
        make_certificate(folder, "server")
        make_certificate(folder, "client")
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> TlsFront:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    async def _serve(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._folder / "server.crt", self._folder / "server.key")
        context.load_verify_locations(self.ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, commands = await asyncio.open_unix_connection(self._socket)
        await asyncio.gather(_copy(reader, commands), _copy(answers, writer))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    except (ConnectionError, ssl.SSLError):
        pass
    finally:
        target.close()


def make_authority(folder: Path) -> Path:
    """A new authority; its certificate."""
    key, certificate = folder / "ca.key", folder / "ca.crt"
    words = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=test CA")
    # Python 3.13 verifies strictly: an authority must say what its key is for.
    words += ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    _openssl(*words, "-keyout", str(key), "-out", str(certificate))
    return certificate


def make_certificate(folder: Path, name: str, *, num_days: int = 1) -> None:
    """`name`.crt and `name`.key for 127.0.0.1, signed by the folder's authority; valid for
    `num_days`, expired if that is negative."""
    request, extensions = folder / f"{name}.csr", folder / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    words = ("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}")
    _openssl(*words, "-keyout", str(folder / f"{name}.key"), "-out", str(request))
    _openssl(
        *("x509", "-req", "-in", str(request), "-days", str(num_days), "-CAcreateserial"),
        *("-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key")),
        *("-extfile", str(extensions), "-out", str(folder / f"{name}.crt")),
    )


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=60)


def tls_settings(folder: Path) -> dict[str, str]:
    """Settings of a run on 127.0.0.1 whose router and servers speak TLS, with files made there."""
    authority = make_authority(folder)
    make_certificate(folder, "parts")
    names = {
        f"{section}.tls_{name}_file": str(folder / f"parts.{end}")
        for section in ("router", "server")
        for name, end in (("cert", "crt"), ("key", "key"))
    }
    return names | {"run.tls_ca_file": str(authority)}

"""Certificates that clients of the run would refuse are refused before anything listens."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from fakes.tls_front import make_authority, make_certificate
from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import RouterSettings, Settings
from outloop.buffer.tls import check_certificate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a certificate for 127.0.0.1, one that has expired, one with a passphrase."""
    folder = tmp_path_factory.mktemp("tls")
    make_authority(folder)
    make_certificate(folder, "server")
    make_certificate(folder, "other")
    make_certificate(folder, "expired", num_days=-1)
    words = ("rsa", "-in", str(folder / "server.key"), "-aes128", "-passout", "pass:secret")
    subprocess.run(
        ["openssl", *words, "-out", str(folder / "closed.key")], check=True, capture_output=True
    )
    (folder / "rubbish.crt").write_text("rubbish")
    return folder


def check(folder: Path, cert: str, key: str, **words: Any) -> None:
    """Check a pair of the folder."""
    settings = RouterSettings(tls_cert_file=folder / cert, tls_key_file=folder / key)
    check_certificate("router", settings, **words)


@pytest.mark.medium
def test_a_certificate_that_clients_accept_is_accepted(folder: Path) -> None:
    """By the authority or by itself; an endpoint without one is plain HTTP."""
    check(folder, "server.crt", "server.key")
    check(folder, "server.crt", "server.key", ca_file=folder / "ca.crt", host="127.0.0.1")
    check_certificate("router", RouterSettings())


@pytest.mark.medium
@pytest.mark.parametrize(
    ("cert", "key", "words", "sentence"),
    [
        ("none.crt", "server.key", {}, r"router\.tls_cert_file=.*none\.crt' cannot be read"),
        ("server.crt", "none.key", {}, r"router\.tls_key_file=.*none\.key' cannot be read"),
        ("rubbish.crt", "server.key", {}, "both in PEM"),
        ("server.crt", "other.key", {}, "cannot be used .*MISMATCH"),
        ("server.crt", "closed.key", {}, "its own key without a passphrase"),
        ("expired.crt", "expired.key", {}, "certificate has expired"),
        ("server.crt", "server.key", {"host": "rl.example.org"}, "made for the address"),
        ("server.crt", "server.key", {"ca_file": "other.crt"}, "signed by run.tls_ca_file"),
        ("server.crt", "server.key", {"ca_file": "none"}, r"run\.tls_ca_file=.* cannot be read"),
    ],
)
def test_a_certificate_that_clients_would_refuse_is_one_sentence(
    cert: str, key: str, words: dict[str, str], sentence: str, folder: Path
) -> None:
    """It names the setting, and what is wrong."""
    found = {name: folder / value if name == "ca_file" else value for name, value in words.items()}
    with pytest.raises(SettingsError, match=sentence):
        check(folder, cert, key, **found)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"router": {"tls_key_file": "a.key"}}, "router.tls_cert_file and router.tls_key_file"),
        ({"server": {"tls_cert_file": "a.crt"}}, "server.tls_cert_file and server.tls_key_file"),
        (
            {
                "server": {
                    "num_servers": 0,
                    "urls": ["https://h"],
                    "tls_cert_file": "a",
                    "tls_key_file": "b",
                }
            },
            "is for servers that the run starts",
        ),
        ({"run": {"tls_ca_file": "ca.crt"}}, "run.tls_ca_file='ca.crt' has no effect"),
    ],
)
def test_settings_of_half_a_certificate_are_refused(
    changes: dict[str, dict[str, str]], sentence: str
) -> None:
    """A key without certificate, a server that cannot, an authority for nothing."""
    with pytest.raises(ValueError, match=sentence):
        Settings(model={"path": "model"}, **changes)

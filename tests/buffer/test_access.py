"""TLS, and a user of Redis that may do only what the buffer does."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.tls_front import TlsFront, make_authority
from outloop.buffer.errors import BufferUnavailable, SettingsError
from outloop.buffer.reader import BufferReader
from outloop.buffer.redis.client import connect_sync
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.run import Run, load_run
from outloop.buffer.settings import build_settings

RIGHTS = (
    *("resetkeys", "~{*", "resetchannels", "&{*", "-@all", "+@read", "+@write", "+@connection"),
    *("+@scripting", "+@blocking", "+@pubsub", "+time", "+multi", "+exec", "-@dangerous"),
)
"""As docs/buffer-keys.md gives them."""


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedRedis) -> Iterator[TlsFront]:
    """The session's server behind TLS."""
    with TlsFront(tmp_path_factory.mktemp("tls"), server.url.removeprefix("unix://")) as front:
        yield front


def _tls(front: TlsFront, **changes: Any) -> dict[str, Any]:
    folder = front.ca_file.parent
    files = {
        "buffer__redis_url": f"rediss://127.0.0.1:{front.port}/0",
        "buffer__redis_ca_file": str(front.ca_file),
        "buffer__redis_cert_file": str(folder / "client.crt"),
        "buffer__redis_cert_key_file": str(folder / "client.key"),
    }
    return {name: value for name, value in (files | changes).items() if value is not None}


@pytest.mark.medium
async def test_a_run_trains_over_tls(front: TlsFront, loop_on: Callable[..., Any]) -> None:
    """Both faces, by certificates of the run's own authority."""
    words = _tls(front)
    loop = await loop_on(words["buffer__redis_url"], **words)
    await loop.play_all()
    loop.reader.acknowledge(loop.train(loop.take(2), 1))
    assert loop.reader.stats()["buffer/acknowledged_groups"] == 2


@pytest.mark.medium
@pytest.mark.parametrize("missing", ["buffer__redis_cert_file", "buffer__redis_ca_file"])
def test_a_peer_that_cannot_be_trusted_is_refused(
    front: TlsFront, make_run: Callable[..., Run], tmp_path: Path, missing: str
) -> None:
    """Without our certificate the server refuses us, with another authority we refuse it."""
    changes: dict[str, Any] = {missing: None}
    if missing == "buffer__redis_cert_file":
        changes["buffer__redis_cert_key_file"] = None
    else:
        changes = {missing: str(make_authority(tmp_path))}
    words = _tls(front, **changes)
    with pytest.raises(BufferUnavailable, match="Redis did not answer"):
        make_run(words["buffer__redis_url"], **words)


@pytest.mark.medium
def test_the_files_of_tls_are_not_written_into_the_url_of_the_run(
    front: TlsFront, make_run: Callable[..., Run]
) -> None:
    """run.json names the server; who joins finds the certificates by the settings."""
    words = _tls(front)
    run = make_run(words["buffer__redis_url"], **words)
    assert "ssl" not in (run.dir / "run.json").read_text()
    reader = BufferReader.connect(load_run(run.dir))
    reader.close()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"redis_url": "redis://h:1/0", "redis_ca_file": "ca.crt"}, "rediss://"),
        ({"redis_url": "rediss://h:1/0", "redis_cert_file": "c.crt"}, "redis_cert_key_file"),
    ],
)
def test_settings_of_tls_that_make_no_sense_are_refused(
    changes: dict[str, str], sentence: str
) -> None:
    """Certificates without TLS, a certificate without its key."""
    with pytest.raises(SettingsError, match=sentence):
        build_settings({"model": {"path": "."}, "buffer": changes}, source="test")


async def test_a_user_with_the_documented_rights_is_enough(
    server: EmbeddedRedis, loop_on: Callable[..., Any], tmp_path: Path
) -> None:
    """An ACL user with its password in a file plays, trains and looks; it cannot empty Redis."""
    client = connect_sync(server.url)
    client.execute_command("ACL", "SETUSER", "outloop", "reset", "on", ">se:cr@t", *RIGHTS)
    client.close()
    (tmp_path / "password").write_text("se:cr@t\n")
    path = server.url.removeprefix("unix://")
    url = f"unix://outloop@{path}"
    loop = await loop_on(url, buffer__redis_password_file=str(tmp_path / "password"))
    await loop.play_all()
    loop.reader.acknowledge(loop.train(loop.take(2), 1))
    assert loop.reader.stats()["buffer/acknowledged_groups"] == 2
    assert loop.reader.dead_letters.list_all() == ()
    assert list(loop.reader.archive.trajectories()) == []
    listening = asyncio.create_task(loop.writer.channel.listen({"routers": lambda _: None}))
    assert await loop.writer.channel.is_listening(30.0)
    assert await loop.writer.channel.publish("routers", b"") == 1
    listening.cancel()
    with pytest.raises(Exception, match="no permissions"):
        loop.reader.client.flushall()


def test_a_wrong_password_is_a_sentence_without_it(
    server: EmbeddedRedis, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """The refusal names the setting, not the secret."""
    (tmp_path / "password").write_text("wrong-one")
    url = f"unix://nobody@{server.url.removeprefix('unix://')}"
    with pytest.raises(BufferUnavailable, match="refused the credentials") as caught:
        make_run(url, buffer__redis_password_file=str(tmp_path / "password"))
    assert "wrong-one" not in str(caught.value)

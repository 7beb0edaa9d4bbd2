"""A run whose version 0 is served, without a trainer that publishes it."""

from outloop.buffer.reader import BufferReader
from outloop.buffer.records import ServerEntry
from outloop.buffer.run import Run


def publish(run: Run, url: str) -> None:
    """Version 0 is served by `url`."""
    reader = BufferReader.connect(run)
    reader.announce_version(0, None)
    entry = ServerEntry(
        server_id="s", url=url, kind="torch", policy_version=0, is_quarantined=False
    )
    reader.registry.register_server(entry)
    reader.registry.set_server_version("s", 0, quarantined=False)
    reader.acknowledge_version(0)
    reader.close()

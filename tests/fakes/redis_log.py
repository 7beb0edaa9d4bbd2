"""What a Redis has written of what it acknowledged."""

import time

import redis


def wait_until_written(client: redis.Redis) -> None:
    """Return when all that the server acknowledged is in its file, where a kill leaves it.

    With `everysec` it holds writes back while its disk is busy with a sync, at most two seconds.
    """
    deadline = time.monotonic() + 30
    while client.info("persistence")["aof_buffer_length"]:
        assert time.monotonic() < deadline, "the server does not write"
        time.sleep(0.01)

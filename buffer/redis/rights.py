"""Whether our user of Redis may do what the buffer does, asked before anything is written."""

from __future__ import annotations

from typing import Any

import redis

from outloop.buffer.errors import SettingsError
from outloop.buffer.redis.client import translated

COMMANDS = (
    *("DEL K", "EXISTS K", "GET K", "HDEL K f", "HEXISTS K f", "HGET K f", "HGETALL K"),
    *("HINCRBY K f 1", "HKEYS K", "HLEN K", "HMGET K f", "HSET K f v", "HSETNX K f v"),
    *("LINDEX K 0", "LLEN K", "LPOP K", "LPUSH K v", "LRANGE K 0 0", "LREM K 0 v", "LTRIM K 0 0"),
    *("PERSIST K", "PEXPIRE K 1", "RENAME K K", "RPUSH K v", "SADD K v", "SET K v"),
    *("SISMEMBER K v", "TIME", "ZADD K 1 v", "ZCARD K", "ZCOUNT K 0 1", "ZINCRBY K 1 v"),
    *("ZRANGE K 0 0", "ZRANGEBYSCORE K 0 1", "ZREM K v", "ZREMRANGEBYRANK K 0 0"),
    *("ZREMRANGEBYSCORE K 0 1", "ZREVRANGE K 0 0"),
    *("UNLINK K", "PING", "PUBLISH K v", "SUBSCRIBE K", "BLPOP K 1", "EVALSHA s 1 K"),
    *("EVAL s 1 K", "SCRIPT LOAD s"),
)
"""What scripts and clients call, with arguments that are only looked at; K: a key or channel."""


def check_rights(client: redis.Redis, tag: str) -> None:
    """Refuse a user that may not do what a run needs.

    Redis looks at a command's rights when it queues it in a transaction. The transaction is given
    up, so that no command is executed.

    Args:
        tag: the hash tag of the run's keys and channels, which the server owns in a cluster.

    Raises:
        SettingsError: names the commands.
        BufferUnavailable: Redis does not answer.
    """
    with translated("asking for the rights of buffer.redis_url's user"):
        refused = _refused(client, f"{{{tag}}}:doctor")
    if refused:
        raise SettingsError(
            f"buffer.redis_url: its user may not {', '.join(refused)} keys and channels of the "
            "run; give it the rights that docs/buffer-keys.md lists"
        )


def _refused(client: redis.Redis, key: str) -> list[str]:
    pool: Any = client.connection_pool
    connection = pool.get_connection()
    try:
        # Outside of a transaction EXEC is an error, but that of a missing right comes first.
        if isinstance(_ask(connection, "EXEC"), redis.exceptions.NoPermissionError):
            return ["EXEC"]
        began = _ask(connection, "MULTI")
        if began is not None:
            # Without a transaction the others would be executed. What is no Redis of its own, such
            # as a proxy, may have none: its rights show when they are used.
            is_right = isinstance(began, redis.exceptions.NoPermissionError)
            return ["MULTI"] if is_right else []
        answers = {
            command.partition(" ")[0]: _ask(
                connection, *(key if word == "K" else word for word in command.split())
            )
            for command in COMMANDS
        }
        # Others are errors of another kind, such as that of a server which has not the key.
        return [
            name
            for name, error in answers.items()
            if isinstance(error, redis.exceptions.NoPermissionError)
        ]
    finally:
        # What is queued is forgotten with the connection.
        connection.disconnect()
        pool.release(connection)


def _ask(connection: Any, *command: str) -> redis.exceptions.ResponseError | None:
    """The error that Redis answers; None: it accepts the command."""
    connection.send_command(*command)
    try:
        connection.read_response()
    except redis.exceptions.ResponseError as error:
        return error
    return None

"""The keys and values behind the twin: the commands that the buffer uses, on dicts and lists.

Owns: data types, expiry, and what each command answers. Does not own: scripts and connections
(twin). Invariant: a command that the buffer does not use is refused by name, never guessed; a
container that became empty is gone, as in Redis.
"""

from __future__ import annotations

import fnmatch
import threading
import time
from collections.abc import Callable
from typing import Any


class CommandError(Exception):
    """What Redis would answer as an error."""


class Keyspace:
    """One database; every command is run under its lock."""

    def __init__(self) -> None:
        self.data: dict[bytes, Any] = {}
        self.expiries: dict[bytes, float] = {}
        self.changed = threading.Condition(threading.RLock())

    def run(self, words: list[bytes]) -> Any:
        """The answer to a command: int, bytes, None, list or True for OK."""
        name, *args = words
        command: Callable[..., Any] | None = getattr(self, f"_{name.decode().lower()}", None)
        if command is None:
            raise CommandError(f"ERR unknown command '{name.decode()}' (the twin has no such)")
        with self.changed:
            now = time.monotonic()
            for key in [key for key, at in self.expiries.items() if at <= now]:
                self._del(key)
            return command(*args)

    def _typed(self, key: bytes, kind: type, *, create: bool = False) -> Any:
        value = self.data.get(key)
        if value is None:
            value = kind()
            if create:
                self.data[key] = value
        if type(value) is not kind:
            raise CommandError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def _gone_if_empty(self, key: bytes) -> None:
        if not self.data.get(key, True):
            self._del(key)

    # Keys.

    def _ping(self) -> Any:
        return b"PONG"

    def _time(self) -> list[bytes]:
        seconds, micros = divmod(time.time_ns() // 1000, 10**6)
        return [b"%d" % seconds, b"%d" % micros]

    def _del(self, *keys: bytes) -> int:
        for key in keys:
            self.expiries.pop(key, None)
        return sum(self.data.pop(key, None) is not None for key in keys)

    _unlink = _del

    def _exists(self, *keys: bytes) -> int:
        return sum(key in self.data for key in keys)

    def _pexpire(self, key: bytes, ms: bytes) -> int:
        if key not in self.data:
            return 0
        self.expiries[key] = time.monotonic() + int(ms) / 1000
        return 1

    def _persist(self, key: bytes) -> int:
        return int(self.expiries.pop(key, None) is not None)

    def _pttl(self, key: bytes) -> int:
        if key not in self.data:
            return -2
        at = self.expiries.get(key)
        return -1 if at is None else int((at - time.monotonic()) * 1000)

    def _rename(self, key: bytes, name: bytes) -> bool:
        if key not in self.data:
            raise CommandError("ERR no such key")
        self._del(name)
        self.data[name] = self.data.pop(key)
        if key in self.expiries:
            self.expiries[name] = self.expiries.pop(key)
        return True

    def _scan(self, cursor: bytes, *options: bytes) -> list[Any]:
        words = dict(zip(options[::2], options[1::2], strict=True))
        pattern = words.get(b"MATCH", b"*").replace(b"[", b"[[]")
        kinds = {b"hash": dict, b"list": list, b"string": bytes, b"set": set, b"zset": Sorted}
        kind = kinds.get(words.get(b"TYPE", b""), object)
        names = [
            name
            for name, value in self.data.items()
            if fnmatch.fnmatchcase(name.decode(), pattern.decode()) and isinstance(value, kind)
        ]
        return [b"0", names]

    # Strings.

    def _set(self, key: bytes, value: bytes, *options: bytes) -> bool:
        self._del(key)
        self.data[key] = value
        if options:
            assert options[0].upper() == b"PX", options
            self._pexpire(key, options[1])
        return True

    def _get(self, key: bytes) -> bytes | None:
        return self._typed(key, bytes) if key in self.data else None

    def _mget(self, *keys: bytes) -> list[bytes | None]:
        return [self._get(key) for key in keys]

    # Hashes.

    def _hsetnx(self, key: bytes, field: bytes, value: bytes) -> int:
        if field in self._typed(key, dict):
            return 0
        return int(self._hset(key, field, value))

    def _hset(self, key: bytes, *words: bytes) -> int:
        fields = self._typed(key, dict, create=True)
        before = len(fields)
        fields.update(zip(words[::2], words[1::2], strict=True))
        return len(fields) - before

    def _hget(self, key: bytes, field: bytes) -> bytes | None:
        return self._typed(key, dict).get(field)

    def _hmget(self, key: bytes, *names: bytes) -> list[bytes | None]:
        fields = self._typed(key, dict)
        return [fields.get(name) for name in names]

    def _hgetall(self, key: bytes) -> list[bytes]:
        return [word for item in self._typed(key, dict).items() for word in item]

    def _hscan(self, key: bytes, cursor: bytes, *options: bytes) -> list[Any]:
        return [b"0", self._hgetall(key)]

    def _hkeys(self, key: bytes) -> list[bytes]:
        return list(self._typed(key, dict))

    def _hlen(self, key: bytes) -> int:
        return len(self._typed(key, dict))

    def _hexists(self, key: bytes, field: bytes) -> int:
        return int(field in self._typed(key, dict))

    def _hdel(self, key: bytes, *names: bytes) -> int:
        fields = self._typed(key, dict)
        number = sum(fields.pop(name, None) is not None for name in names)
        self._gone_if_empty(key)
        return number

    def _hincrby(self, key: bytes, field: bytes, by: bytes) -> int:
        fields = self._typed(key, dict, create=True)
        if b"%d" % int(by) != by:
            raise CommandError("ERR value is not an integer or out of range")
        value = int(fields.get(field, b"0")) + int(by)
        fields[field] = b"%d" % value
        return value

    # Lists.

    def _rpush(self, key: bytes, *values: bytes) -> int:
        items = self._typed(key, list, create=True)
        items.extend(values)
        self.changed.notify_all()
        return len(items)

    def _lpush(self, key: bytes, *values: bytes) -> int:
        items = self._typed(key, list, create=True)
        items[:0] = reversed(values)
        self.changed.notify_all()
        return len(items)

    def _lpop(self, key: bytes) -> bytes | None:
        items = self._typed(key, list)
        value = items.pop(0) if items else None
        self._gone_if_empty(key)
        return value

    def _blpop(self, key: bytes, timeout_s: bytes) -> list[bytes] | None:
        self.changed.wait_for(lambda: key in self.data, float(timeout_s))
        value = self._lpop(key)
        return None if value is None else [key, value]

    def _lrange(self, key: bytes, start: bytes, stop: bytes) -> list[bytes]:
        items = self._typed(key, list)
        return items[_span(start, stop, len(items))]

    def _lindex(self, key: bytes, index: bytes) -> bytes | None:
        items, at = self._typed(key, list), int(index)
        return items[at] if -len(items) <= at < len(items) else None

    def _lset(self, key: bytes, index: bytes, value: bytes) -> bool:
        self._typed(key, list)[int(index)] = value
        return True

    def _llen(self, key: bytes) -> int:
        return len(self._typed(key, list))

    def _ltrim(self, key: bytes, start: bytes, stop: bytes) -> bool:
        items = self._typed(key, list)
        items[:] = items[_span(start, stop, len(items))]
        self._gone_if_empty(key)
        return True

    def _lrem(self, key: bytes, count: bytes, value: bytes) -> int:
        assert count == b"0"
        items = self._typed(key, list)
        before = len(items)
        items[:] = [item for item in items if item != value]
        self._gone_if_empty(key)
        return before - len(items)

    # Sets.

    def _sadd(self, key: bytes, *members: bytes) -> int:
        known = self._typed(key, set, create=True)
        before = len(known)
        known.update(members)
        return len(known) - before

    def _sismember(self, key: bytes, member: bytes) -> int:
        return int(member in self._typed(key, set))

    # Sorted sets.

    def _zadd(self, key: bytes, *words: bytes) -> int:
        scores = self._typed(key, Sorted, create=True)
        before = len(scores)
        for score, member in zip(words[::2], words[1::2], strict=True):
            scores[member] = float(score)
        return len(scores) - before

    def _zincrby(self, key: bytes, by: bytes, member: bytes) -> bytes:
        scores = self._typed(key, Sorted, create=True)
        scores[member] = scores.get(member, 0.0) + float(by)
        return _score(scores[member])

    def _zscore(self, key: bytes, member: bytes) -> bytes | None:
        score = self._typed(key, Sorted).get(member)
        return None if score is None else _score(score)

    def _zrem(self, key: bytes, *members: bytes) -> int:
        scores = self._typed(key, Sorted)
        number = sum(scores.pop(member, None) is not None for member in members)
        self._gone_if_empty(key)
        return number

    def _zcard(self, key: bytes) -> int:
        return len(self._typed(key, Sorted))

    def _zcount(self, key: bytes, low: bytes, high: bytes) -> int:
        return len(list(self._typed(key, Sorted).between(low, high)))

    def _zrange(self, key: bytes, start: bytes, stop: bytes, *options: bytes) -> list[bytes]:
        ordered = self._typed(key, Sorted).ordered()
        return _with_scores(ordered[_span(start, stop, len(ordered))], options)

    def _zrevrange(self, key: bytes, start: bytes, stop: bytes, *options: bytes) -> list[bytes]:
        ordered = self._typed(key, Sorted).ordered()[::-1]
        return _with_scores(ordered[_span(start, stop, len(ordered))], options)

    def _zrangebyscore(self, key: bytes, low: bytes, high: bytes, *options: bytes) -> list[bytes]:
        members = self._typed(key, Sorted)
        found = [(member, members[member]) for member in members.between(low, high)]
        scores, words = options[:1], options[1:]
        if scores != (b"WITHSCORES",):
            scores, words = (), options
        if words:
            assert words[0].upper() == b"LIMIT", options
            start, count = int(words[1]), int(words[2])
            found = found[start : start + count]
        return _with_scores(found, scores)

    def _zremrangebyrank(self, key: bytes, start: bytes, stop: bytes) -> int:
        found = self._zrange(key, start, stop)
        return self._zrem(key, *found) if found else 0

    def _zremrangebyscore(self, key: bytes, low: bytes, high: bytes) -> int:
        found = self._typed(key, Sorted).between(low, high)
        return self._zrem(key, *found) if found else 0


class Sorted(dict[bytes, float]):
    """Members by score."""

    def ordered(self) -> list[tuple[bytes, float]]:
        """(member, score), lowest first; equal scores by member."""
        return sorted(self.items(), key=lambda item: (item[1], item[0]))

    def between(self, low: bytes, high: bytes) -> list[bytes]:
        """Members with scores in a range; `(` leaves its end out."""
        bottom, top = float(low.lstrip(b"(")), float(high.lstrip(b"("))
        return [
            member
            for member, score in self.ordered()
            if (score > bottom if low[:1] == b"(" else score >= bottom)
            and (score < top if high[:1] == b"(" else score <= top)
        ]


def _span(start: bytes, stop: bytes, length: int) -> slice:
    low, high = int(start), int(stop)
    low = max(low + length, 0) if low < 0 else low
    high = high + length if high < 0 else high
    return slice(low, max(high + 1, 0))


def _score(score: float) -> bytes:
    return b"%d" % score if score == int(score) else repr(score).encode()


def _with_scores(items: list[tuple[bytes, float]], options: tuple[bytes, ...]) -> list[bytes]:
    if not options:
        return [member for member, _ in items]
    return [word for member, score in items for word in (member, _score(score))]

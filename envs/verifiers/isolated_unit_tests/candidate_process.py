"""The process of the code under test: it loads the code and answers the tests' calls.

Objects that are not plain data stay here. The code controls this whole process, so the other side
treats whatever it sends as a mere value.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from .serialization import MessageSocket, decode, encode

_MAX_ITEMS = 100_000


def main() -> None:
    """Load code.txt and serve descriptor 3."""
    line = MessageSocket(3)
    kept: list[object] = []
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module

    def keep(value: object) -> int:
        kept.append(value)
        return len(kept) - 1

    def find(name: Any) -> object:
        number, path = name
        found = module if number is None else kept[number]
        for part in path:
            found = getattr(found, part)
        return found

    try:
        with open("code.txt", encoding="utf-8", errors="surrogateescape") as file:
            # Without the `from __future__` of this file.
            code = compile(file.read(), "candidate.py", "exec", dont_inherit=True)
        exec(code, module.__dict__)
        names = [name for name in vars(module) if not name.startswith("__")]
        line.send({"names": names})
    except BaseException as error:  # noqa: BLE001 - all that the code raises is an answer
        line.send({"raised": [type(error).__name__, str(error)[:1000]]})
        return
    while True:
        try:
            asked = line.receive()
        except EOFError:
            return
        try:
            line.send(_serve(asked, keep, find))
        except BaseException as error:  # noqa: BLE001 - all that the code raises is an answer
            line.send({"raised": [type(error).__name__, str(error)[:1000]]})


def _serve(
    asked: Any,
    keep: Callable[[Any], int],
    find: Callable[[Any], Any],
) -> object:
    target = find((asked["on"], asked["path"]))
    if asked["do"] == "get":
        return {"value": encode(target, keep)}
    if asked["do"] == "list":
        items = []
        for item in target:
            items.append(item)
            if len(items) > _MAX_ITEMS:
                raise OverflowError(f"more than {_MAX_ITEMS} items")
        return {"value": encode(items, keep)}
    arguments = decode(asked["arguments"], find)
    names = decode(asked["names"], find)
    before = asked["arguments"]
    value = encode(target(*arguments, **names), keep)
    after = encode(arguments, keep)
    return {"value": value, "changed": None if after == before else after}

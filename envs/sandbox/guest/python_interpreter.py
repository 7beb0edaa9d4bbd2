"""A Python that keeps its variables from one input to the next; run in a sandbox by `python3 -c`.

Each line of descriptor 3 is an input: a token and a text, as literals. When it has run, the token
and a status are written back there, as a line. The value of a last expression is printed, as at
Python's prompt.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
import traceback
import types

_LINE = 3


def run(source: str, name: str, names: dict[str, object]) -> None:
    """Run one input; raises what it raises."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), names)
        if value is not None:
            print(repr(value))  # noqa: T201 - what a prompt does


def status_of(source: str, name: str, names: dict[str, object]) -> int:
    """Run one input; 0, or the status that it ends with. `exit()` ends the input alone."""
    try:
        run(source, name, names)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code, file=sys.stderr)  # noqa: T201 - what Python does
        return 1
    except BaseException as error:  # noqa: BLE001 - whatever the input raises is shown
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0


def main() -> None:
    """Serve inputs until the line ends."""
    os.set_inheritable(_LINE, False)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    own = os.getpid()
    with os.fdopen(os.dup(_LINE), "rb") as line:
        for number, text in enumerate(line, 1):
            token, source = ast.literal_eval(text.decode())
            status = status_of(source, f"<input {number}>", module.__dict__)
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (OSError, ValueError, AttributeError):
                    status = status or 1
            if os.getpid() != own:
                os._exit(status)  # A fork that the input left.
            os.write(_LINE, f"{token} {status}\n".encode())


if __name__ == "__main__":
    main()

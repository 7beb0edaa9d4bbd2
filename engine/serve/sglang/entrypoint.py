"""Checks arguments with SGLang's own parser and becomes its server; runs under SGLang's Python.

An argument that the installed SGLang does not know ends the process with code 2 and a sentence,
before any weight is read; with `--check` nothing is started at all.

Called as `python -P entrypoint.py [--check] TABLE`, TABLE being JSON with upstream names. Without
--check the first line of its standard input is the server's key, or empty: unlike a command line
no other user can read it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import runpy
import sys
from typing import Any, NoReturn

_REFUSED = 2


def main(arguments: list[str]) -> None:
    """Check, then serve; ends with code 2 and one sentence when refused."""
    is_check = arguments[0] == "--check"
    table: dict[str, Any] = json.loads(arguments[-1])
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    command_line = _command_line(parser, table)
    if is_check:
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                prepared = prepare_server_args(command_line)
                # Contradictions between arguments show only here.
                prepared.resolve_once()
        except SystemExit:
            _refuse(errors.getvalue().strip().splitlines()[-1])
        except (ValueError, AssertionError, OSError, RuntimeError) as error:
            _refuse(str(error).strip() or type(error).__name__)
        return
    # `ps` shows the arguments of the start, not this list.
    sys.argv = ["sglang.launch_server", *command_line, *_keys(sys.stdin.readline().strip())]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _keys(key: str) -> list[str]:
    """One key for turns and for control."""
    return [f"--api-key={key}", f"--admin-api-key={key}"] if key else []


def _command_line(parser: argparse.ArgumentParser, table: dict[str, Any]) -> list[str]:
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    line: list[str] = []
    for key, value in table.items():
        name = key.replace("-", "_")
        action = actions.get(name) or actions.get(_by_flag(parser, key))
        if action is None:
            nearest = difflib.get_close_matches(name, actions, n=3)
            hint = f"; the nearest are {', '.join(nearest)}" if nearest else ""
            _refuse(f"server.sglang.{key} is not an argument of the installed SGLang{hint}")
        line += _argument(key, value, action)
    return line


def _by_flag(parser: argparse.ArgumentParser, key: str) -> str:
    """The destination of a flag such as `tp`, which stands for tp_size."""
    action = parser._option_string_actions.get("--" + key.replace("_", "-"))
    return action.dest if action else ""


def _argument(key: str, value: Any, action: argparse.Action) -> list[str]:
    flag = next(flag for flag in action.option_strings if flag.startswith("--"))
    if action.nargs == 0:
        if not isinstance(value, bool):
            _refuse(f"server.sglang.{key}={value!r}; true or false is allowed")
        if value:
            return [flag]
        off = [f for f in action.option_strings if f.startswith("--no-")]
        return off[:1]
    if isinstance(value, list):
        return [flag, *(str(item) for item in value)]
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    # One word, so that a value which begins with a dash stays a value.
    return [f"{flag}={value}"]


def _refuse(sentence: str) -> NoReturn:
    sys.stderr.write(f"outloop: {sentence}\n")
    sys.stderr.flush()
    raise SystemExit(_REFUSED)


if __name__ == "__main__":
    main(sys.argv[1:])

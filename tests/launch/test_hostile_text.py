"""No terminal obeys what a policy, an agent, an exception or a file wrote."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from outloop.buffer.foreign_text import one_line, printable, storable
from outloop.buffer.rich_terminal import PlainTable, show, show_table
from outloop.engine.launch.console import RunProgress

HOSTILE = [
    "cannot open [/tmp/x]",
    "[/b] seven [bold red]alarm[/]",
    "[link=http://evil]click[/link] :bomb: \\[x]",
    "\x1b]0;title\x07\x1b[2J\x1b[31mred",
    "\x1b]52;c;Y2F0\x07 \x1b]8;;http://evil\x1b\\link",
    "\x9b31mC1 \x9d0;title\x9c \x85 \x8d",
    "\u202eevil\u202c \u2066x\u2069 \u200f \u061c",
    "back\x08\x08space \r over \x0b\x0c \x7f \x00",
    "half \ud83d pair \udce9",
    "\u2028line\u2029 \U000e0041tag \ue000 \ufeff",
]
"""Markup of rich, escape sequences, C1, marks of direction, halves of pairs."""
HARMLESS = ["naïve 日本語 👩\u200d💻 ∑ a\u00a0b", "می\u200cخواهم", "tab\tand\nline"]  # noqa: RUF001


def is_obeyed(shown: str) -> bool:
    """True if it holds a character that a terminal may obey."""
    return any(not c.isprintable() and c not in "\n\t\u200c\u200d\u00a0" for c in shown)


@pytest.mark.parametrize("text", HOSTILE)
def test_text_is_shown_as_it_is_written(text: str) -> None:
    """Nothing is left out, nothing is markup, and it can be encoded."""
    shown = printable(text)
    assert not is_obeyed(shown)
    assert not is_obeyed(one_line(text))
    assert "\n" not in one_line(text + "\nsecond line")
    shown.encode()
    storable(text).encode()
    assert shown.startswith(text[:3]) or text[0] in "\x1b\x9b\u202e\u2028"


@pytest.mark.parametrize("text", [chr(code) for code in range(160)] + HOSTILE)
def test_a_line_of_json_stays_json(text: str) -> None:
    """Escapes are those of JSON, so that `--json` can be read by a program."""
    assert json.loads(printable(json.dumps(text))) == text


@pytest.mark.parametrize("text", HARMLESS)
def test_text_of_people_stays_as_it_is(text: str) -> None:
    """Letters of all scripts, emoji, tabs and line ends."""
    assert printable(text) == storable(text) == text


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("text", HOSTILE)
def test_what_an_agent_wrote_does_not_end_or_steer_the_launcher(
    text: str, is_terminal: bool, tmp_path: Path
) -> None:
    """As a warning, as what a part waits for, as a step's name, in a line and in a table."""
    (tmp_path / "metrics.jsonl").write_text("")
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=is_terminal, color_system=None)
    with RunProgress(tmp_path, num_steps=2, console=console) as progress:
        progress.update({"runner": {"warning": text, "waiting_for": text}})
        progress.update({"runner": {"warning": f"again {text}", "waiting_for": f"and {text}"}})
    table = PlainTable(title=text)
    table.add_plain_column(text)
    table.add_plain_row([text])
    show_table(console, table)
    show(console, text, style="yellow")
    shown = out.getvalue()
    if not is_terminal:  # rich moves the cursor for its progress
        assert not is_obeyed(shown)
    assert "warning from runner: " + one_line(text)[:20] in shown
    for escape in ("\x1b]", "\x1b[2J", "\x1b[31m", "\x9b", "\u202e", "\x07"):
        assert escape not in shown

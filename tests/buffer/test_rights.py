"""The rights of the run's user of Redis."""

import re
from pathlib import Path

from outloop.buffer.redis.rights import COMMANDS

SCRIPTS = Path(__file__).resolve().parents[2] / "buffer/redis/scripts"


def test_every_command_of_the_scripts_is_asked_about() -> None:
    """A script that calls another one needs it in the table."""
    text = "\n".join(path.read_text() for path in SCRIPTS.glob("*.lua"))
    called = {name.upper() for name in re.findall(r"redis\.p?call\(\s*['\"](\w+)", text)}
    assert len(called) > 30
    assert called <= {command.partition(" ")[0] for command in COMMANDS}

"""Make the stack's secrets, each in the volume of those who may read it; what is there is kept.

/keys/redis/password: Redis and its clients. /keys/run/keys.json: the router and who else joins the
run. /keys/runner/key: the runner, beside agents that must read nothing else.
"""

import os
import secrets
from pathlib import Path

from outloop.buffer.run import keep_keys
from outloop.buffer.whole_file import whole_file

KEYS = Path(os.environ.get("KEYS_DIR", "/keys"))


def write_once(path: Path, secret: str) -> None:
    """Complete or not at all, for its owner only."""
    if path.exists():
        return
    with whole_file(path) as writing:
        writing.touch(mode=0o600)
        writing.write_text(secret)


write_once(KEYS / "redis" / "password", secrets.token_urlsafe(32))
run_keys = keep_keys(KEYS / "run" / "keys.json")
write_once(KEYS / "runner" / "key", run_keys.runner_key)

"""Make the stack's secrets, each in the volume of those who may read it; what is there is kept.

/keys/redis/password: Redis and its clients. /keys/run/keys.json: the router and who else joins the
run. /keys/runner/key: the runner, beside agents that must read nothing else.
"""

import os
import secrets
from pathlib import Path

from outloop.buffer.run import keep_keys

KEYS = Path(os.environ.get("KEYS_DIR", "/keys"))


def write_once(path: Path, secret: str) -> None:
    """Complete or not at all, for its owner only."""
    if path.exists():
        return
    partial = path.with_suffix(".partial")
    partial.touch(mode=0o600)
    partial.write_text(secret)
    os.replace(partial, path)


write_once(KEYS / "redis" / "password", secrets.token_urlsafe(32))
run_keys = keep_keys(KEYS / "run" / "keys.json")
write_once(KEYS / "runner" / "key", run_keys.runner_key)

"""Who may do what: runner key, admin key and the keys of episodes.

Owns: minting and checking keys. Does not own: whether an episode is open. Invariant: every
comparison takes the same time whatever the key; an episode key opens one episode.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from outloop.buffer.run import RunKeys
from outloop.buffer.runner_keys import OWN_KEY, KnownKeys, digest_of
from outloop.router.errors import Refusal

_PREFIX = "ol-ep-"
_EPISODE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SIGNATURE_CHARS = 40


class KeyRing:
    """The run's keys."""

    def __init__(self, keys: RunKeys) -> None:
        self._runner = keys.runner_key.encode()
        self._admin = keys.admin_key.encode()
        self._secret = keys.episode_secret.encode()
        self.known = KnownKeys()
        """Keys that were added, revoked or replaced since; whoever reads them replaces this."""

    def episode_key(self, episode_id: str) -> str:
        """The key of one episode; the same for every router of the run."""
        return f"{_PREFIX}{episode_id}-{self._sign(episode_id)}"

    def episode_of(self, key: str) -> str | None:
        """The episode that `key` opens, or None when it is no valid episode key."""
        if not key.startswith(_PREFIX) or not key.isascii():
            return None
        episode_id, _, signature = key[len(_PREFIX) :].rpartition("-")
        if not _EPISODE_ID.fullmatch(episode_id):
            # Of whatever length a stranger chose: nothing is kept of it.
            return None
        expected = self._sign(episode_id)
        return episode_id if hmac.compare_digest(signature, expected) else None

    def require_runner(self, key: str) -> str:
        """Refuse anything but a runner key; its name."""
        # Of a digest, time tells nothing that helps to find a key.
        name = self.known.by_digest.get(digest_of(key))
        if name is not None:
            return name
        if self.known.is_own_revoked:
            raise Refusal(
                401,
                "invalid_api_key",
                "the run's own runner key was revoked; send the key that `outloop keys add` made",
            )
        self._require(key, self._runner, "runner")
        return OWN_KEY

    def require_admin(self, key: str) -> None:
        """Refuse anything but the admin key; one that was replaced is another key."""
        digest = self.known.admin_digest
        if digest is not None and hmac.compare_digest(digest_of(key), digest):
            return
        self._require(key, self._admin if digest is None else None, "admin")

    def _sign(self, episode_id: str) -> str:
        return hmac.digest(self._secret, episode_id.encode(), hashlib.sha256).hex()[
            :_SIGNATURE_CHARS
        ]

    def _require(self, key: str, expected: bytes | None, role: str) -> None:
        if expected is None or not hmac.compare_digest(key.encode(), expected):
            raise Refusal(
                401,
                "invalid_api_key",
                f"this route needs the {role} key as `Authorization: Bearer KEY`; "
                f"{'no key was sent' if not key else 'the key that was sent is another one'}",
            )


def check_episode_id(episode_id: str) -> str:
    """`episode_id`, if it may name an episode.

    Raises:
        Refusal: 400.
    """
    if not _EPISODE_ID.fullmatch(episode_id):
        raise Refusal(
            400,
            "invalid_value",
            f"episode_id={episode_id[:140]!r}; 1 to 128 letters, digits, `.`, `_` and `-` "
            "are allowed. Leave it out to have one made.",
            param="episode_id",
        )
    return episode_id

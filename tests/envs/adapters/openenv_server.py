"""A real OpenEnv server of one environment: say the word that the seed asks for.

python openenv_server.py PORT NUM_SESSIONS      # with openenv-core installed
"""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Word(Action):
    word: str


class Shown(Observation):
    shown: str


class Words(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.wanted = ["hello", "goodbye"][seed % 2]
        return Shown(shown=f"say {self.wanted}", done=False, reward=None)

    def step(self, action, timeout_s=None, **options):
        return Shown(shown="thanks", done=True, reward=float(action.word == self.wanted))

    @property
    def state(self):
        return State()


app = create_fastapi_app(Words, Word, Shown, max_concurrent_envs=int(sys.argv[2]))
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")

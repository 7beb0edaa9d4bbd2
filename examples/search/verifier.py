"""Right is the name that the question was made from."""

from outloop.envs.verifiers.text import Exact

verify = Exact()

"""Scores the repository that an agent program left in its episode's folder, as rollout.py does."""

from outloop.envs.verifiers.repository_tests import RepositoryTests

verify = RepositoryTests()
tear_down = verify.tear_down

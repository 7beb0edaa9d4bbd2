"""Scores an answer: 1 if it is mathematically the expected one, by math-verify."""

from outloop.envs.verifiers.math_equivalence import Math

verify = Math()

"""Verifiers with default settings, for `env.verifier = "outloop.envs.verifiers.presets:math"`.

Importing this starts nothing; a verifier starts its processes when it is first called.
"""

from __future__ import annotations

from outloop.envs.verifiers.code import InputOutput, UnitTests
from outloop.envs.verifiers.math_equivalence import Math
from outloop.envs.verifiers.text import Exact, JsonSchema, Number
from outloop.envs.verifiers.tool_calls import ToolCalls

exact = Exact()
number = Number()
math = Math()
json_schema = JsonSchema()
tool_calls = ToolCalls()
unit_tests = UnitTests()
input_output = InputOutput()

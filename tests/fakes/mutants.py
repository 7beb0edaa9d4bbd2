"""Functions, the checks that hold them, and wrong variants which those checks must catch."""

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Check = Callable[[Any], None]
"""Asserts that the functions of a module, or of a wrong variant of it, are what they should be."""


@dataclass(frozen=True)
class Mutant:
    """A wrong variant: one piece of a function's text is another."""

    right: str
    wrong: str
    within: str = ""
    """The function that holds the text, where it is not the one that is checked."""


@dataclass(frozen=True)
class Held:
    """A function of a module, what holds it, and what must not pass for it."""

    module: ModuleType
    name: str
    """As in the module: `grpo`, or `ScoredTurn.earned`."""
    check: Check
    mutants: tuple[Mutant, ...]

    def __str__(self) -> str:
        return f"{self.module.__name__.rpartition('.')[2]}.{self.name}"

    def variant(self, mutant: Mutant) -> ModuleType:
        """The module with the mutant in it; the module itself stays what it is."""
        source = inspect.getsource(self.module)
        name = mutant.within or self.name
        first, last = dict(functions_of(self.module))[name]
        lines = source.splitlines(keepends=True)
        text = "".join(lines[first - 1 : last])
        assert text.count(mutant.right) == 1, f"{self}: {mutant.right!r} is not once in {name}"
        changed = text.replace(mutant.right, mutant.wrong)
        whole = "".join(lines[: first - 1]) + changed + "".join(lines[last:])
        found = ModuleType(self.module.__name__)
        exec(compile(whole, f"<mutant of {self}>", "exec"), found.__dict__)
        return found


def held(module: ModuleType, name: str, check: Check, *mutants: tuple[str, ...]) -> Held:
    """`held(advantages, "grpo", check_grpo, ("right", "wrong"), ("right", "wrong", "within"))`."""
    return Held(module, name, check, tuple(Mutant(*mutant) for mutant in mutants))


def passes(one: Held, mutant: Mutant) -> bool:
    """Whether the check takes a wrong variant for right."""
    variant = one.variant(mutant)
    try:
        one.check(variant)
    except AssertionError:
        return False
    return True


def functions_of(module: ModuleType) -> Iterator[tuple[str, tuple[int, int]]]:
    """The functions of a module and of its classes, each with the lines of its body."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, _lines_of(node)
        if isinstance(node, ast.ClassDef):
            for own in node.body:
                if isinstance(own, ast.FunctionDef):
                    yield f"{node.name}.{own.name}", _lines_of(own)


def _lines_of(node: ast.FunctionDef) -> tuple[int, int]:
    """Of what it does: behind its docstring."""
    has_words = ast.get_docstring(node) is not None and len(node.body) > 1
    assert node.end_lineno is not None
    return node.body[1 if has_words else 0].lineno, node.end_lineno


def public_functions_of(module: ModuleType) -> list[str]:
    """Those that others may call, by name."""
    return [
        name
        for name, _ in functions_of(module)
        if not any(part.startswith("_") for part in name.split("."))
    ]

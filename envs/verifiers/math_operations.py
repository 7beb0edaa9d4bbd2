"""Tells a mathematical result from a restated question: which operations are left to do?

An answer may leave no operation that the expected answer does not leave too. Fractions, radicals,
constants, coefficients, sums of unlike terms, factored polynomials, scientific notation and percent
are results, as textbooks print them. A fraction need not be reduced, unless its two numbers are
those of the question.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import sympy

_WORD = re.compile(
    r"(?<![A-Za-z])(?:[bp]?mod|gcd|lcm|hcf|[dt]?binom|choose|floor|ceil|det|tr|rank|max|min|of|round"
    r"|abs|arg|Re|Im|norm|dim|[Gg]amma|zeta|erf|nCr|nPr)(?![A-Za-z])"
)
"""Operations that a parser may do on its own, as commands of LaTeX or as words."""
_INTEGER = r"\{?\s*(-?\d[\d,]*)\s*\}?"
_FRACTION = re.compile(
    rf"\\[dtc]?frac\s*{_INTEGER}\s*{_INTEGER}|(?<![\d.^}}])(-?\d+)\s*(?:/|\\div|÷|:)\s*(\d+)(?![\d.])"
)
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)")
_MATRIX = re.compile(r"\\begin\{(\w*matrix)\}.*?\\end\{\1\}", re.DOTALL)
_DOUBLE_MINUS = re.compile(r"-\s*[({]*\s*-")
_CONTAINERS: Any = (
    *(sympy.Tuple, sympy.FiniteSet, sympy.Interval, sympy.Union, sympy.And, sympy.Or),
    sympy.core.relational.Relational,
)


def left_open(text: str, tree: Any) -> set[str]:
    """The operations that an answer leaves to whoever reads it.

    Args:
        text: its LaTeX.
        tree: the same, parsed without evaluation.
    """
    return {*_of_text(text), *_of_tree(tree)}


def _of_text(text: str) -> Iterator[str]:
    yield from _WORD.findall(text)
    if re.search(r"(?<![A-Za-z])(?:ln|log|lg)(?![A-Za-z])", text):
        yield "log"
    if re.search(r"\d\s*\^\s*\{?\s*-\s*1(?!\d)", text):
        yield "a power of numbers"
    if _DOUBLE_MINUS.search(text):
        yield "a double minus"
    if re.search(r"\{[vV]matrix\}", text):
        yield "det"
    if "matrix}" in text and _MATRIX.sub("", text).strip():
        yield "something around a matrix"
    for pattern in (_FRACTION, _SHORT_FRACTION):
        for found in pattern.finditer(text):
            above, below = (int(part.replace(",", "")) for part in found.groups() if part)
            yield from _of_fraction(above, below)


def _of_fraction(above: int, below: int) -> Iterator[str]:
    yield "a fraction"
    if math.gcd(above, below) > 1 or abs(below) == 1:
        yield f"{abs(above)}/{abs(below)}"


def _of_tree(tree: Any) -> Iterator[str]:
    if isinstance(tree, sympy.MatrixBase):
        yield from _of_all(tree.flat())
    elif isinstance(tree, list | tuple):
        yield from _of_all(tree)
    elif isinstance(tree, _CONTAINERS):
        yield from _of_all(tree.args)
        yield from _of_container(tree)
    elif isinstance(tree, sympy.Add):
        yield from _of_sum(tree)
    elif isinstance(tree, sympy.Mul):
        yield from _of_product(tree)
    elif isinstance(tree, sympy.Pow):
        yield from _of_power(tree.base, tree.exp)
    elif isinstance(tree, sympy.exp):
        yield from _of_power(sympy.E, tree.args[0])
    elif isinstance(tree, sympy.Basic) and tree.args:
        yield from _of_other(tree)


def _of_container(tree: Any) -> Iterator[str]:
    """Of a union whose parts come together, and of a relation that is not solved."""
    if isinstance(tree, sympy.Union):
        value = sympy.Union(*tree.args)
        if not isinstance(value, sympy.Union) or len(value.args) < len(tree.args):
            yield "a union that comes together"
    elif isinstance(tree, sympy.core.relational.Relational) and len(tree.free_symbols) == 1:
        solved = (sympy.Symbol, sympy.core.function.AppliedUndef)
        if not any(isinstance(side, solved) for side in tree.args):
            yield "a relation to solve"


def _of_all(parts: Iterable[Any]) -> Iterator[str]:
    for part in parts:
        yield from _of_tree(part)


def _flat(tree: Any, kind: Any) -> list[Any]:
    """The parts of a sum or product, with those of sums in it, or products."""
    if not isinstance(tree, kind):
        return [tree]
    return [part for argument in tree.args for part in _flat(argument, kind)]


def _value(tree: Any) -> Any:
    """The tree with the evaluation that sympy makes on its own; nothing is solved or expanded."""
    return tree.doit(deep=True) if isinstance(tree, sympy.Basic) else tree


def _is_number(tree: Any) -> bool:
    """Whether it is a rational number or a decimal, perhaps left to calculate."""
    return isinstance(_value(tree), sympy.Number)


def _of_sum(tree: Any) -> Iterator[str]:
    terms = _flat(tree, sympy.Add)
    yield from _of_all(terms)
    if sum(map(_is_number, terms)) > 1:
        yield "a sum of numbers"
        return
    value = sympy.expand_log(sympy.Add(*map(_value, terms)), factor=True)
    before = [sympy.expand_log(_value(term), factor=True) for term in terms]
    num_terms = sum(len(sympy.Add.make_args(term)) for term in before)
    if len(sympy.Add.make_args(value)) < num_terms:
        yield "a sum of like terms"


def _of_product(tree: Any) -> Iterator[str]:
    factors = _flat(tree, sympy.Mul)
    if _is_percent(factors) or _is_scientific(factors):
        return
    factors = [one for one in factors if one not in (1, -1)]
    above: list[Any] = []
    below: list[Any] = []
    for factor in factors:
        if isinstance(factor, sympy.Pow) and factor.exp.is_number and _value(factor.exp) == -1:
            below.extend(one for one in _flat(factor.base, sympy.Mul) if one not in (1, -1))
        elif isinstance(factor, sympy.Rational) and factor.q != 1:
            above.extend([] if abs(factor.p) == 1 else [sympy.Integer(factor.p)])
            below.append(sympy.Integer(factor.q))
        else:
            above.append(factor)
    yield from _of_all([*above, *below])
    if below:
        yield "a division"
    if any(_is_number(one) and not _value(one).is_Integer for one in below):
        yield "a division by a fraction"
    for side in (above, below):
        if sum(map(_is_number, side)) > 1:
            yield "a product of numbers"
    numbers = [_value(one) for side in (above, below) for one in side if _is_number(one)]
    is_fraction = len(numbers) == 2 and any(map(_is_number, above)) and any(map(_is_number, below))
    if is_fraction and all(one.is_Integer for one in numbers):
        yield from _of_fraction(int(numbers[0]), int(numbers[1]))
    yield from _of_irrationals(above, below)


def _of_irrationals(above: list[Any], below: list[Any]) -> Iterator[str]:
    rest = [one for one in (*above, *(1 / one for one in below)) if not _is_number(one)]
    value = sympy.Mul(*map(_value, rest))
    sums = [one for one in above if isinstance(one, sympy.Add) and not one.free_symbols]
    if len(sums) > 1:
        yield "a product of sums"
    num_left = len([one for one in sympy.Mul.make_args(value) if not one.is_number or _rest(one)])
    if num_left < len(rest):
        yield "a product that comes together"
    for one in below:
        if _is_number(one):
            continue
        if one.free_symbols:
            yield "a division by symbols"
        elif isinstance(one, sympy.Add):
            yield "a division by a sum"
        else:
            yield "a division by a root" if one.has(sympy.Pow) else "a division by a constant"


def _rest(one: Any) -> bool:
    return not isinstance(one, sympy.Number)


def _is_percent(factors: list[Any]) -> bool:
    plain = [one for one in factors if not isinstance(one, sympy.UnevaluatedExpr) and one != -1]
    return len(plain) == 1 and len(factors) > 1 and isinstance(plain[0], sympy.Number)


def _is_scientific(factors: list[Any]) -> bool:
    powers = [one for one in factors if isinstance(one, sympy.Pow) and one.base == 10]
    others = [one for one in factors if one not in powers and one != -1]
    return (
        len(powers) == len(others) == 1
        and isinstance(powers[0].exp, sympy.Integer)
        and isinstance(others[0], sympy.Number)
        and 1 <= abs(others[0]) < 10
    )


def _of_power(base: Any, exponent: Any) -> Iterator[str]:
    yield from _of_all([base, exponent])
    if base.free_symbols or exponent.free_symbols:
        yield from _of_power_of_symbols(base, _value(exponent))
        return
    base_value, number = _value(base), _value(exponent)
    if number == -1 and isinstance(base_value, sympy.Integer):
        return
    if isinstance(base_value, sympy.Number):
        if isinstance(number, sympy.Integer):
            yield "a power of numbers"
        elif isinstance(number, sympy.Rational):
            yield from _of_root(base_value, number)
    elif isinstance(base_value, sympy.core.numbers.NumberSymbol):
        if not _rest(_value(base_value**number)):
            yield "a power of numbers"
    elif isinstance(number, sympy.Rational) and not isinstance(number, sympy.Integer):
        if isinstance(base, sympy.Add):
            yield "a root of a sum"
    elif isinstance(number, sympy.Integer) and number != -1:
        yield "a power of numbers"


def _of_power_of_symbols(base: Any, exponent: Any) -> Iterator[str]:
    if exponent == 0:
        yield "a power that comes out"
    if isinstance(base, sympy.Pow) and exponent.is_Integer and _value(base.exp).is_Integer:
        yield "a power of a power"
    if base.free_symbols and exponent.is_number and exponent.is_negative:
        yield "a division by symbols"


def _of_root(radicand: Any, exponent: Any) -> Iterator[str]:
    """Of a root of a number: does a factor of it come out?"""
    if not isinstance(radicand, sympy.Rational):
        yield "a root of a decimal"
        return
    value = radicand**exponent
    if isinstance(value, sympy.Number):
        yield "a root that comes out"
    elif abs(exponent.p) != 1:
        if radicand.is_Integer and isinstance(value, sympy.Mul):
            yield "a root to simplify"
    else:
        degree = int(exponent.q)
        for part in (abs(radicand.p), radicand.q):
            if any(times >= degree for times in sympy.factorint(part).values()):
                yield "a root to simplify"


def _of_other(tree: Any) -> Iterator[str]:
    """Of functions, sums over an index, integrals, limits, and whatever else has arguments."""
    if isinstance(tree, sympy.core.function.AppliedUndef):
        yield from _of_all(tree.args)
        return
    name = type(tree).__name__
    yield name
    if isinstance(tree, sympy.Function):
        yield from _of_all(one for one in tree.args if one != sympy.E)
        if not tree.free_symbols and not isinstance(_value(tree), type(tree)):
            value = _value(tree)
            if isinstance(value, sympy.Number) or not value.has(type(tree)):
                yield f"{name} that comes out"

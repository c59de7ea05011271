"""Relations that the figures of a record keep, each in one line: `left == right if condition`, or `<=`, `>=`.

Both sides are formulas over fields of the record by their paths (`time.train_time_s`), over quantities of
`Facts` (`steps_run`), and over what a rule names besides. A path through a list stands for the values of all
its entries. A relation is not judged where one of its figures is absent, or where it would divide by zero,
or where its condition does not hold. In a condition what is absent is None.
"""

from __future__ import annotations

import ast
import math
import operator
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stratbench.analysis.audit.checks import ROUNDING, SIGNS, Facts, unless

#: Gives the value of a path, from its first word and the others; raises Absent without one.
Lookup = Callable[[str, list[str]], Any]
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "len": len,
    "log": math.log,
    "max": max,
    "mean": statistics.fmean,
    "sum": sum,
}


class Absent(Exception):
    """A figure of a relation is absent."""


@dataclass(frozen=True)
class Relation:
    """One relation.

    Its sides may miss each other by `relative`, a share of them (of the right one, unless both are to be
    equal), and by `absolute`, a number or a formula.
    """

    text: str
    relative: float = ROUNDING
    absolute: str | float = 0.0

    @cached_property
    def sides(self) -> tuple[str, str, str]:
        """The left side, the sign, the right side."""
        claim = self.text.partition(" if ")[0]
        sign = next(sign for sign in SIGNS if f" {sign} " in claim)
        left, right = claim.split(f" {sign} ")
        return left, sign, right

    @cached_property
    def _formulas(self) -> list[Callable[[Lookup], Any]]:
        left, _, right = self.sides
        return [formula(text) for text in (left, right, str(self.absolute))]

    @cached_property
    def _condition(self) -> Callable[[Lookup], Any]:
        return formula(self.text.partition(" if ")[2] or "1")

    def faults(self, at: Lookup) -> Iterator[str]:
        """Yields a sentence with both sides and their values unless the relation holds, or is not judged."""

        def or_none(first: str, keys: list[str]) -> Any:
            try:
                return at(first, keys)
            except Absent:
                return None

        if not self._condition(or_none):
            return
        left, sign, right = self.sides
        try:
            value, other, absolute = (side(at) for side in self._formulas)
        except (Absent, ZeroDivisionError):
            return
        yield from unless(left, value, sign, right, other, self.relative, absolute)


def relations(*rows: str | tuple[Any, ...]) -> tuple[Relation, ...]:
    """Relations from their texts, or from tuples of all that one states."""
    return tuple(Relation(*((row,) if isinstance(row, str) else row)) for row in rows)


def unless_hold(
    facts: Facts, kept: tuple[Relation, ...], of: str = "", **named: Any
) -> Iterator[str]:
    """Yields a sentence for each relation that does not hold.

    `of`: whose figures these are, if not the cell's; `named`: further figures by the names that the
    relations give them, or parts of the record in whose paths they are the first word.
    """

    def at(first: str, keys: list[str]) -> Any:
        value: Any
        if first in named:
            value = named[first]
        elif first in facts.record:
            value = facts.record[first]
        else:
            value = getattr(facts, first)
        for key in keys:
            if isinstance(value, list):
                value = [entry[key] for entry in value]
            else:
                value = value.get(key) if isinstance(value, dict) else None
        if value is None or (isinstance(value, list) and None in value):
            raise Absent
        return value

    for relation in kept:
        for fault in relation.faults(at):
            yield f"{of}: {fault}" if of else fault


def formula(text: str) -> Callable[[Lookup], Any]:
    """A function of a lookup that computes a formula of numbers, paths, operators and FUNCTIONS."""
    return _read(ast.parse(text, mode="eval").body)


def _read(node: ast.expr) -> Callable[[Lookup], Any]:
    match node:
        case ast.Constant(value=value):
            return lambda at: value
        case ast.BinOp(left=one, op=op, right=other):
            left, right, made = _read(one), _read(other), OPERATORS[type(op)]
            return lambda at: made(left(at), right(at))
        case ast.Compare(left=one, ops=[op], comparators=[other]):
            left, right, holds = _read(one), _read(other), OPERATORS[type(op)]
            return lambda at: holds(left(at), right(at))
        case ast.BoolOp(op=op, values=values):
            parts, whole = [_read(part) for part in values], all if isinstance(op, ast.And) else any
            return lambda at: whole(part(at) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=one):
            denied = _read(one)
            return lambda at: not denied(at)
        case ast.Call(func=ast.Name(id=name), args=args):
            inner, function = [_read(arg) for arg in args], FUNCTIONS[name]
            return lambda at: function(*(arg(at) for arg in inner))
    first, *keys = ast.unparse(node).split(".")
    return lambda at: at(first, keys)

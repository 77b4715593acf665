"""What a public call may be given, read off its own annotations: anything else is one sentence, before any work.

`checked_call` wraps a function, `checked_class` a class with its public methods. A name that the call does not take, or
one that it needs and did not get, a value of another kind than annotated, and one out of its range are `BadInput`; a
whole number of numpy's is taken for one of Python's. Ranges are annotations too: `Count` (a whole number, at least 1),
`Natural` (at least 0), `Share` (a number from 0 to 1), ``Annotated[float, AtLeast(2)]``, ``Annotated[int, Between(0,
65535)]``, and ``Literal["a", "b"]``; a text in ``Annotated`` is what the kind is called in messages. A parameter called
``seed`` is at most `LARGEST_SEED`. What cannot be told from one value (a shape, a name that exists) the call says.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
import os
import threading
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, Union

from qkscope.errors import BadInput, check_name_length

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)


class Between(NamedTuple):
    """The range from ``least`` to ``most``, both included; without an end if ``most`` is not given."""

    least: float
    most: float = math.inf

    def holds(self, value: Any) -> bool:
        """Whether a value lies in it."""
        return bool(self.least <= value <= self.most)

    def __str__(self) -> str:
        return f"at least {self.least}" if self.most == math.inf else f"from {self.least} to {self.most}"


AtLeast = Between  # as ``AtLeast(1)``: the name for a range without an end
Count = Annotated[int, AtLeast(1)]
Prompts = Annotated[int, Between(1, 1_000_000)]
Natural = Annotated[int, AtLeast(0)]
Share = Annotated[float, Between(0, 1)]

LARGEST_SEED = 2**62  # generators take 64 bits, and what is derived from a seed must fit too
_SEEDS = Between(-LARGEST_SEED, LARGEST_SEED)
_LOOKED_AT = 1024  # items of a list: units by the million are drawn as they are read


class _OutOfRange(Exception):
    """A value is of its kind, but not in its range; says which range, and what came."""


class Kind(NamedTuple):
    """Whether a value is of a kind (or it is `_OutOfRange`), and what the kind is called."""

    accepts: Callable[[Any], bool]
    called: str


def checked_call(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, which refuses what its annotations do not allow.

    >>> @checked_call
    ... def half(n: Count) -> float:
    ...     return n / 2
    >>> half("six")
    Traceback (most recent call last):
    qkscope.errors.BadInput: n of half should be a whole number, but got 'six'.
    >>> half(0)
    Traceback (most recent call last):
    qkscope.errors.BadInput: n is at least 1, but got 0.
    """
    table: list[tuple[list[Kind], dict[str, Kind]]] = []
    function = function if "." in function.__qualname__ else _counted(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not table:  # annotations are read at the first call: they may name what is imported later
            table.append(_kinds(function))
        unnamed, named = table[0]
        if not _accepted(unnamed, named, args, kwargs):
            own, more = _made(function, named, args, kwargs)
            return function(*own, **more)
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            _bind(function, args, kwargs, error)
            raise
        except OSError as error:
            check_name_length(error)
            raise

    return call


_VERBS = threading.local()


def verb_under_way() -> int | None:
    """A number for the public function that a caller is waiting for; None outside of any.

    Nobody changes a model while they wait, so what takes long to ask of it is asked once for each.
    """
    return getattr(_VERBS, "number", 0) if getattr(_VERBS, "depth", 0) else None


def _counted(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        _VERBS.depth = getattr(_VERBS, "depth", 0) + 1
        if _VERBS.depth == 1:
            _VERBS.number = getattr(_VERBS, "number", 0) + 1
        try:
            return function(*args, **kwargs)
        finally:
            _VERBS.depth -= 1

    return run


def checked_class(cls: C) -> C:
    """The same class, whose constructor and public methods refuse what their annotations do not allow."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, classmethod | staticmethod):
            setattr(cls, name, type(member)(checked_call(member.__func__)))
        elif inspect.isfunction(member):
            setattr(cls, name, checked_call(member))
    return cls


def _accepted(unnamed: list[Kind], named: dict[str, Kind], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every value is of its kind as it is: the way of nearly every call, so it asks no more."""
    try:
        if not all(kind.accepts(value) for kind, value in zip(unnamed, args, strict=False)):
            return False
        return all(named[name].accepts(value) for name, value in kwargs.items() if name in named)
    except _OutOfRange:
        return False


# ---------------------------------------------------------------- the slow way, where something is wrong


def _made(
    function: Callable[..., Any], named: dict[str, Kind], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with what can be made into the right kind made so; the first that cannot is refused."""
    bound, shown = _bind(function, args, kwargs, TypeError()), _shown(function, args)
    for name, value in bound.arguments.items():
        how, kind = bound.signature.parameters[name].kind, named.get(name, _ANYTHING)
        if how is inspect.Parameter.VAR_POSITIONAL:
            bound.arguments[name] = tuple(_one(kind, name, shown, part) for part in value)
        elif how is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = {key: _one(kind, key, shown, part) for key, part in value.items()}
        else:
            bound.arguments[name] = _one(kind, name, shown, value)
    return bound.args, bound.kwargs


def _one(kind: Kind, name: str, shown: str, value: Any) -> Any:
    plain = _plain(value)
    try:
        for made in (value, plain, tuple(plain) if isinstance(plain, list) else plain):
            if kind.accepts(made):
                return made
    except _OutOfRange as wrong:
        raise BadInput(f"{name} is {wrong}.") from None
    raise BadInput(f"{name} of {shown} should be {kind.called}, but got {came(value)}.")


def _plain(value: Any, inside: bool = False) -> Any:
    """Numbers of numpy and torch as Python's, also in lists, dicts and tuples; a list in a list is made a tuple."""
    if isinstance(value, Mapping):
        return {key: _plain(part, True) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if inside else type(value))(_plain(part, True) for part in value)
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _shown(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """What a call is called: ``decompose``, ``Scope.encode``, or ``Example`` for its constructor."""
    first = next(iter(inspect.signature(function).parameters), "")
    name = function.__name__.removesuffix("_task")  # of the task whose name is taken by Python's filter
    if first not in ("self", "cls") or not args:
        return name
    owner = args[0] if isinstance(args[0], type) else type(args[0])
    return owner.__name__ if name == "__init__" else f"{owner.__name__}.{name}"


def _bind(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: TypeError
) -> inspect.BoundArguments:
    """The values by their names, or which name is unknown, missing or given twice."""
    signature = inspect.signature(function)
    with suppress(TypeError):
        return signature.bind(*args, **kwargs)
    parameters = {n: p for n, p in signature.parameters.items() if n not in ("self", "cls")}
    takes = [n for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD]
    free = [n for n in takes if parameters[n].kind is not inspect.Parameter.KEYWORD_ONLY]
    listed = f"it takes {', '.join(takes)}" if takes else "it takes nothing"
    given = max(len(args) - (len(signature.parameters) - len(parameters)), 0)
    if unknown := [n for n in kwargs if n not in takes]:
        near = difflib.get_close_matches(unknown[0], takes, n=1)
        says = f"takes no {unknown[0]!r}: {f'did you mean {near[0]}' if near else listed}"
    elif given > len(free):
        rest = [n for n in takes if n not in free]
        advice = f"name the others ({', '.join(rest)})" if rest else listed
        says = f"takes at most {len(free)} unnamed values, but got {given}: {advice}"
    elif twice := [n for n in free[:given] if n in kwargs]:
        says = f"got {twice[0]} twice, with and without its name: give it once"
    else:
        missing = [n for n in takes[given:] if parameters[n].default is inspect.Parameter.empty and n not in kwargs]
        says = f"needs {' and '.join(missing)}: {listed}"
    raise BadInput(f"{_shown(function, args)} {says}.") from error


def came(value: Any, limit: int = 60) -> str:
    """A value in a message: itself where it is short and plain, otherwise what it is."""
    kind = type(value).__name__
    if value is None or isinstance(value, str | bytes | int | float | complex):
        shown = repr(value)
        return shown if len(shown) <= limit else f"{shown[:limit]}…"
    if kind in ("Tensor", "ndarray", "Parameter"):
        what, dtype = "an array" if kind == "ndarray" else "a tensor", str(value.dtype).removeprefix("torch.")
        return f"{what} of shape {tuple(value.shape)}, {dtype}"
    if isinstance(value, list | tuple):
        parts = [came(item, 20) for item in value[:4]] + ["…"] * (len(value) > 4)
    elif isinstance(value, Mapping):
        parts = [f"{came(key, 20)}: {came(item, 20)}" for key, item in list(value.items())[:3]]
    else:
        return f"the class {value.__name__}" if isinstance(value, type) else kind
    shown = ", ".join(parts)
    return f"{kind} ({shown})" if len(shown) <= limit else kind


# ---------------------------------------------------------------- annotations as kinds


def _kinds(function: Callable[..., Any]) -> tuple[list[Kind], dict[str, Kind]]:
    """The kind of every unnamed value in order, and of every parameter by name."""
    unnamed, named = list[Kind](), {name: kind_of(hint) for name, hint in _hints(function).items()}
    if "seed" in named:
        named["seed"] = _narrowed(named["seed"], _SEEDS.holds, str(_SEEDS))
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            unnamed.append(named.get(name, _ANYTHING))
        elif parameter.kind is parameter.VAR_POSITIONAL:
            unnamed.extend([named.get(name, _ANYTHING)] * 32)
    return unnamed, named


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Annotations, each read by itself: where one names what only a type checker sees, the others still count."""
    found: dict[str, Any] = {}
    inner: Any = inspect.unwrap(function)
    for name, hint in inner.__annotations__.items():
        one = type("One", (), {"__annotations__": {name: hint}})
        with suppress(NameError, TypeError, SyntaxError):
            found |= typing.get_type_hints(one, globalns=inner.__globals__, include_extras=True)
    return found


_PLAIN_KINDS: dict[Any, Kind] = {
    int: Kind(lambda v: type(v) is int, "a whole number"),
    float: Kind(lambda v: type(v) in (float, int), "a number"),
    bool: Kind(lambda v: type(v) is bool, "True or False"),
    str: Kind(lambda v: isinstance(v, str), "a text"),
    bytes: Kind(lambda v: isinstance(v, bytes), "bytes"),
    Path: Kind(lambda v: isinstance(v, os.PathLike), "a path"),
    type: Kind(lambda v: isinstance(v, type), "a class"),
    Callable: Kind(callable, "something to call"),
    types.NoneType: Kind(lambda v: v is None, "None"),
}
_ANYTHING = Kind(lambda v: True, "anything")
_FILE_NAME = Kind(lambda v: isinstance(v, str) and "\0" not in v, "a text")  # no system has one with a null byte


def kind_of(hint: Any) -> Kind:
    """The kind that an annotation names; anything where that cannot be told at a glance."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    outer = types.NoneType if hint is None else origin or hint
    if origin is Annotated:
        kind = kind_of(inside[0])
        for by in inside[1:]:
            if isinstance(by, Between):
                kind = _narrowed(kind, by.holds, str(by))
            elif isinstance(by, str):
                kind = kind._replace(called=by)
        return kind
    if origin in (Union, types.UnionType):
        return _union(inside)
    if origin is Literal:
        types_of, called = {type(value) for value in inside}, f"one of {', '.join(map(str, inside))}"
        return _narrowed(Kind(lambda v: type(v) in types_of, called), lambda v: v in inside, called)
    if hasattr(hint, "array_type") and hasattr(hint, "dim_str"):
        sorts = {"Float": "floating-point ", "Int": "whole-number ", "Bool": "true-or-false "}
        sort = sorts.get(hint.__name__.split("[")[0], "")
        return Kind(lambda v: isinstance(v, hint), f"a {sort}tensor of shape ({', '.join(hint.dim_str.split())})")
    if not isinstance(outer, type) or outer in (Any, object):
        return _ANYTHING
    if outer in _PLAIN_KINDS:
        return _PLAIN_KINDS[outer]
    if outer is tuple and inside and inside[-1] is not Ellipsis:
        return _row(inside)
    if issubclass(outer, Mapping):
        return _mapping(inside)
    if outer in (list, tuple, set, frozenset) or outer.__module__ == "collections.abc":
        return _listed(outer, inside)
    article, comes = "an" if outer.__name__[0] in "AEIOU" else "a", vars(outer).get("comes_from")
    return Kind(lambda v: isinstance(v, outer), f"{article} {outer.__name__}" + (f" ({comes})" if comes else ""))


def _narrowed(kind: Kind, holds: Callable[[Any], bool], range_called: str) -> Kind:
    """The values of a kind for which something holds, and what their range is called."""

    def accepts(value: Any) -> bool:
        if not kind.accepts(value):
            return False
        if value is not None and not holds(value):
            raise _OutOfRange(f"{range_called}, but got {came(value)}")
        return True

    return Kind(accepts, kind.called)


def _union(inside: tuple[Any, ...]) -> Kind:
    kinds = [_FILE_NAME if part is str and Path in inside else kind_of(part) for part in inside]
    if _ANYTHING in kinds:
        return _ANYTHING
    tests = tuple(kind.accepts for kind in kinds)
    named = list(dict.fromkeys(kind.called for kind in kinds if kind.called != "None")) or ["None"]
    first, last = named[:-1], named[-1]
    comma = "," if " or " in last or len(first) > 1 else ""

    def accepts(value: Any) -> bool:
        for test in tests:
            try:
                if test(value):
                    return True
            except _OutOfRange:
                if not first:  # else it might have been one of the others
                    raise
        return False

    return Kind(accepts, f"{', '.join(first)}{comma} or {last}" if first else last)


def _row(inside: tuple[Any, ...]) -> Kind:
    kinds = [kind_of(part) for part in inside]
    tests, called = [kind.accepts for kind in kinds], ", ".join(kind.called for kind in kinds)

    def accepts(value: Any) -> bool:
        return isinstance(value, tuple) and len(value) == len(tests) and all(map(operator.call, tests, value))

    return Kind(accepts, f"a {'pair' if len(kinds) == 2 else 'tuple'} ({called})")


def _listed(outer: type, inside: tuple[Any, ...]) -> Kind:
    item = kind_of(inside[0]) if inside else _ANYTHING
    wanted = outer if outer in (Iterable, Iterator, set, frozenset) else Sequence

    def accepts(value: Any) -> bool:
        if not isinstance(value, wanted) or isinstance(value, str | bytes | bytearray | Mapping):
            return False
        if not isinstance(value, list | tuple):
            return True
        return all(map(item.accepts, value if len(value) <= _LOOKED_AT else value[:_LOOKED_AT]))

    words = {"a text": "texts", "a whole number": "whole numbers", "a number": "numbers"}
    called = words.get(item.called, f"items that are each {item.called}")
    return Kind(accepts, "a list" if item is _ANYTHING else f"a list of {called}")


def _mapping(inside: tuple[Any, ...]) -> Kind:
    key, item = (kind_of(part) for part in inside or (Any, Any))

    def accepts(value: Any) -> bool:
        if not isinstance(value, Mapping) or len(value) > _LOOKED_AT:
            return isinstance(value, Mapping)
        return all(map(key.accepts, value)) and all(map(item.accepts, value.values()))

    return Kind(accepts, "a dict" if item is _ANYTHING else f"a dict whose values are each {item.called}")

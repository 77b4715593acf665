"""What a public call may be given, read off its own annotations: anything else is one sentence, before any work.

`checked_call` wraps a function, `checked_class` a class with its public methods. A value of another kind than
annotated, a name that the call does not take, or one that it needs and did not get is `BadInput`; a whole number of
numpy's is taken for one of Python's. What a value must be beyond its kind (a range, a shape, a name that exists) the
call says itself.
"""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import operator
import os
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, Union

from qkscope.errors import BadInput, check_name_length

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)

LARGEST_SEED = 2**62  # generators take 64 bits, and what is derived from a seed must fit too
_LOOKED_AT = 1024  # items of a list: units by the million are drawn as they are read


class Kind(NamedTuple):
    """Whether a value is of a kind, what the kind is called, and what else can be made into it (None: nothing)."""

    accepts: Callable[[Any], bool]
    called: str
    made: Callable[[Any], Any] | None = None


_NAME = Kind(lambda v: isinstance(v, str) and "\0" not in v, "a text")  # of a file: no system has one with a null byte


def checked_call(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, which refuses what its annotations do not allow.

    >>> @checked_call
    ... def half(n: int) -> float:
    ...     return n / 2
    >>> half("six")
    Traceback (most recent call last):
    qkscope.errors.BadInput: n of half should be a whole number, but got 'six'.
    """
    table: list[tuple[tuple[Kind | None, ...], dict[str, Kind | None]]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not table:  # annotations are read at the first call: they may name what is imported later
            table.append(_kinds(function))
        positional, named = table[0]
        for kind, value in zip(positional, args, strict=False):
            if kind is not None and not kind.accepts(value):
                break
        else:
            for name, value in kwargs.items():
                kind = named.get(name)
                if kind is not None and not kind.accepts(value):
                    break
            else:
                try:
                    return function(*args, **kwargs)
                except TypeError as error:
                    _check_names(function, args, kwargs, error)
                    raise
                except OSError as error:
                    check_name_length(error)
                    raise
        own, more = _made(function, named, args, kwargs)
        return function(*own, **more)

    return call


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


# ---------------------------------------------------------------- the slow way, where something is wrong


def _shown(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """What a call is called: ``decompose``, ``Scope.encode``, or ``Example`` for its constructor."""
    first = next(iter(inspect.signature(function).parameters), "")
    name = function.__name__.removesuffix("_task")  # of the task whose name is taken by Python's filter
    if first not in ("self", "cls") or not args:
        return name
    owner = args[0] if isinstance(args[0], type) else type(args[0])
    return owner.__name__ if name == "__init__" else f"{owner.__name__}.{name}"


def _check_names(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: TypeError
) -> inspect.BoundArguments:
    """Say which name is unknown, missing or given twice; returns where the names are in order."""
    signature, shown = inspect.signature(function), _shown(function, args)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        pass
    parameters = {n: p for n, p in signature.parameters.items() if n not in ("self", "cls")}
    takes = [n for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD]
    free = [n for n in takes if parameters[n].kind is not inspect.Parameter.KEYWORD_ONLY]
    listed = f"it takes {', '.join(takes)}" if takes else "it takes nothing"
    given = len(args) - (len(signature.parameters) - len(parameters))
    unknown = next((n for n in kwargs if n not in takes), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, takes, n=1)
        raise BadInput(f"{shown} takes no {unknown!r}: {f'did you mean {near[0]}' if near else listed}.") from error
    if given > len(free):
        rest = [n for n in takes if n not in free]
        advice = f"name the others ({', '.join(rest)})" if rest else listed
        raise BadInput(f"{shown} takes at most {len(free)} unnamed values, but got {given}: {advice}.") from error
    twice = next((n for n in free[: max(given, 0)] if n in kwargs), None)
    if twice is not None:
        raise BadInput(f"{shown} got {twice} twice, with and without its name: give it once.") from error
    missing = [
        n for n in takes[max(given, 0) :] if parameters[n].default is inspect.Parameter.empty and n not in kwargs
    ]
    raise BadInput(f"{shown} needs {' and '.join(missing)}: {listed}.") from error


def _made(
    function: Callable[..., Any], kinds: Mapping[str, Kind | None], args: tuple[Any, ...], kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The arguments with what can be made into the right kind made so; the first that cannot is refused."""
    bound, shown = _check_names(function, args, kwargs, TypeError()), _shown(function, args)
    for name, value in bound.arguments.items():
        how = inspect.signature(function).parameters[name].kind
        kind = kinds.get(name)
        if how is inspect.Parameter.VAR_POSITIONAL:
            bound.arguments[name] = tuple(_one(kind, name, shown, part) for part in value)
        elif how is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = {key: _one(kind, key, shown, part) for key, part in value.items()}
        else:
            bound.arguments[name] = _one(kind, name, shown, value)
    return bound.args, bound.kwargs


def _one(kind: Kind | None, name: str, shown: str, value: Any) -> Any:
    if kind is None or kind.accepts(value):
        return value
    if kind.made is not None:
        try:
            made = kind.made(value)
        except (TypeError, ValueError, RuntimeError):
            made = value
        if kind.accepts(made):
            return made
    raise BadInput(f"{name} of {shown} should be {kind.called}, but got {came(value)}.")


def came(value: Any, limit: int = 60) -> str:
    """A value in a message: itself where it is short and plain, otherwise what it is."""
    if value is None or isinstance(value, str | bytes | int | float | complex):
        shown = repr(value)
        return shown if len(shown) <= limit else f"{shown[:limit]}…"
    if type(value).__name__ in ("Tensor", "ndarray", "Parameter") and hasattr(value, "shape"):
        dtype = str(value.dtype).removeprefix("torch.")
        return (
            f"{'an array' if type(value).__name__ == 'ndarray' else 'a tensor'} of shape {tuple(value.shape)}, {dtype}"
        )
    if isinstance(value, list | tuple):
        shown = ", ".join(came(item, 20) for item in value[:4]) + (", …" if len(value) > 4 else "")
        return f"{type(value).__name__} ({shown})" if len(shown) <= limit else type(value).__name__
    if isinstance(value, Mapping):
        shown = ", ".join(f"{came(key, 20)}: {came(item, 20)}" for key, item in list(value.items())[:3])
        return f"{type(value).__name__} ({shown})" if len(shown) <= limit else type(value).__name__
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


# ---------------------------------------------------------------- annotations as kinds


def _kinds(function: Callable[..., Any]) -> tuple[tuple[Kind | None, ...], dict[str, Kind | None]]:
    """The kind of every positional parameter in order, and of every parameter by name."""
    hints, positional, named = _hints(function), list[Kind | None](), dict[str, Kind | None]()
    for name, parameter in inspect.signature(function).parameters.items():
        kind = kind_of(hints[name]) if name in hints else None
        if name == "seed" and kind is not None:
            kind = _seed(kind)
        named[name] = kind
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(kind)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            positional.extend([kind] * 32)
    return tuple(positional), named


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, SyntaxError):  # one that only a type checker sees: the others still count
        found: dict[str, Any] = {}
        inner: Any = inspect.unwrap(function)
        for name, hint in inner.__annotations__.items():
            one = type("One", (), {"__annotations__": {name: hint}})
            with suppress(NameError, TypeError, SyntaxError):
                found |= typing.get_type_hints(one, globalns=inner.__globals__, include_extras=True)
        return found


@functools.cache
def _plain() -> dict[Any, Kind]:
    return {
        int: Kind(lambda v: type(v) is int, "a whole number", _whole),
        float: Kind(lambda v: type(v) in (float, int), "a number", _number),
        bool: Kind(lambda v: type(v) is bool, "True or False", _truth),
        str: Kind(lambda v: isinstance(v, str), "a text"),
        bytes: Kind(lambda v: isinstance(v, bytes), "bytes"),
        Path: Kind(lambda v: isinstance(v, os.PathLike), "a path"),
        type(None): Kind(lambda v: v is None, "None"),
    }


def _whole(value: Any) -> int:
    if isinstance(value, bool) or _is_truth(value):
        raise TypeError
    return operator.index(value)


def _is_truth(value: Any) -> bool:
    return str(getattr(value, "dtype", "")).endswith("bool") and value.shape == ()


def _number(value: Any) -> float:
    if isinstance(value, str | bytes | bool) or getattr(value, "shape", ()) != ():
        raise TypeError
    return float(value)


def _truth(value: Any) -> bool:
    if not _is_truth(value):
        raise TypeError
    return bool(value)


def _seed(kind: Kind) -> Kind:
    def fits(value: Any) -> bool:
        return kind.accepts(value) and (type(value) is not int or abs(value) <= LARGEST_SEED)

    return Kind(fits, "a whole number of at most 62 bits", kind.made)


def kind_of(hint: Any) -> Kind | None:
    """The kind that an annotation names; None where it allows anything, or says what cannot be told at a glance."""
    if isinstance(hint, typing.TypeVar) or hint in (Any, object, inspect.Parameter.empty) or isinstance(hint, str):
        return None
    if hint is None:
        hint = type(None)
    if isinstance(hint, type) and hint in _plain():
        return _plain()[hint]
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:  # with a text: what to call it
        kind, called = kind_of(inside[0]), next((part for part in inside[1:] if isinstance(part, str)), None)
        return kind if kind is None or called is None else kind._replace(called=called)
    if origin in (Union, types.UnionType):
        named = [_NAME if part is str and Path in inside else kind_of(part) for part in inside]
        return _union(named)
    if origin is Literal:
        sorts = tuple({type(value) for value in inside})
        return Kind(lambda v: type(v) in sorts, f"one of {', '.join(map(str, inside))}")
    if hasattr(hint, "array_type") and hasattr(hint, "dim_str"):
        return _tensor(hint)
    outer = origin if isinstance(origin, type) else hint
    if outer is collections.abc.Callable:
        return Kind(callable, "something to call")
    if not isinstance(outer, type):
        return None
    if outer is type:
        return Kind(lambda v: isinstance(v, type), "a class")
    if issubclass(outer, tuple) and inside and inside[-1] is not Ellipsis and outer is tuple:
        return _row(inside)
    if issubclass(outer, str | bytes) or not issubclass(outer, Collection | collections.abc.Iterable):
        return Kind(lambda v: isinstance(v, outer), _called(outer))
    if issubclass(outer, Mapping) or outer is dict:
        return _mapping(inside)
    if outer in (list, tuple, set, frozenset) or outer.__module__ == "collections.abc":
        return _listed(outer, inside)
    return Kind(lambda v: isinstance(v, outer), _called(outer))


def _called(cls: type) -> str:
    """What a class is called in a message, and where one comes from, where the class says so."""
    article = "an" if cls.__name__[0] in "AEIOU" else "a"
    comes = vars(cls).get("comes_from", "")
    return f"{article} {cls.__name__}" + (f" ({comes})" if comes else "")


def _union(parts: Sequence[Kind | None]) -> Kind | None:
    if any(part is None for part in parts):
        return None
    kinds = [part for part in parts if part is not None]
    named = list(dict.fromkeys(kind.called for kind in kinds if kind.called != "None")) or ["None"]

    def made(value: Any) -> Any:
        for kind in kinds:
            if kind.made is None:
                continue
            try:
                found = kind.made(value)
            except (TypeError, ValueError, RuntimeError):
                continue
            if kind.accepts(found):
                return found
        raise TypeError

    tests = tuple(kind.accepts for kind in kinds)
    return Kind(lambda v: any(test(v) for test in tests), _either(named), made)


def _either(named: Sequence[str]) -> str:
    """``a, b, or c``; kinds with an or of their own come last."""
    first, last = named[:-1], named[-1]
    return last if not first else f"{', '.join(first)}{',' if ' or ' in last or len(first) > 1 else ''} or {last}"


def _tensor(hint: Any) -> Kind:
    sizes = ", ".join(hint.dim_str.split())
    sort = {"Float": "floating-point ", "Int": "whole-number ", "Bool": "true-or-false "}.get(
        hint.__name__.split("[")[0], ""
    )
    return Kind(lambda v: isinstance(v, hint), f"a {sort}tensor of shape ({sizes})")


def _row(inside: tuple[Any, ...]) -> Kind:
    kinds = [kind_of(part) for part in inside]
    pair = [kind.accepts for kind in kinds if kind is not None]

    def accepts(value: Any) -> bool:
        if len(pair) == len(kinds) == 2:  # spans are made by the million
            return isinstance(value, tuple) and len(value) == 2 and pair[0](value[0]) and pair[1](value[1])
        return isinstance(value, tuple) and len(value) == len(kinds) and all(
            kind is None or kind.accepts(part) for kind, part in zip(kinds, value, strict=True)
        )  # fmt: skip

    def made(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise TypeError
        return tuple(part if k is None or k.accepts(part) or k.made is None else k.made(part)
                     for k, part in zip(kinds, value, strict=True))  # fmt: skip

    named = ", ".join("anything" if kind is None else kind.called for kind in kinds)
    return Kind(accepts, f"a pair ({named})" if len(kinds) == 2 else f"a tuple ({named})", made)


def _listed(outer: type, inside: tuple[Any, ...]) -> Kind:
    item = kind_of(inside[0]) if inside else None
    lazily = outer in (collections.abc.Iterable, collections.abc.Iterator)
    wanted = outer if lazily or outer in (set, frozenset) else Sequence

    def accepts(value: Any) -> bool:
        if not isinstance(value, wanted) or isinstance(value, str | bytes | bytearray | Mapping):
            return False
        if item is None or not isinstance(value, list | tuple):
            return True
        return all(map(item.accepts, value if len(value) <= _LOOKED_AT else value[:_LOOKED_AT]))

    def made(value: Any) -> Any:
        if item is None or item.made is None or not isinstance(value, list | tuple):
            raise TypeError
        return type(value)(part if item.accepts(part) else item.made(part) for part in value)

    return Kind(accepts, "a list" if item is None else f"a list of {_plural(item.called)}", made)


def _plural(called: str) -> str:
    words = {"a text": "texts", "a whole number": "whole numbers", "a number": "numbers"}
    return words.get(called, f"items that are each {called}")


def _mapping(inside: tuple[Any, ...]) -> Kind:
    kinds = [kind_of(part) for part in inside] if len(inside) == 2 else [None, None]

    def accepts(value: Any) -> bool:
        if not isinstance(value, Mapping):
            return False
        if len(value) > _LOOKED_AT:
            return True
        return all((kinds[0] is None or kinds[0].accepts(k)) and (kinds[1] is None or kinds[1].accepts(v))
                   for k, v in value.items())  # fmt: skip

    named = "" if kinds[1] is None else f" whose values are each {kinds[1].called}"
    return Kind(accepts, f"a dict{named}")

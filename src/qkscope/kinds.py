"""What a public call may be given, read off its own annotations: anything else is one sentence, before any work.

`checked_call` wraps a function, `checked_class` a class with its public methods; pydantic does the checking, strictly.
A name that the call does not take, or one that it needs and did not get, a value of another kind than annotated, and
one out of its range are `BadInput`; a whole number of numpy's is taken for one of Python's. Ranges are annotations too:
`Count` (a whole number, at least 1), `Natural` (at least 0), `Share` (a number from 0 to 1),
``Annotated[float, AtLeast(2)]``, ``Annotated[int, Interval(ge=0, le=65535)]``, and ``Literal["a", "b"]``; a text in the
``Annotated`` of a list or dict is what it is called in messages. A parameter called ``seed`` is at most `LARGEST_SEED`.
What cannot be told from one value (a shape, a name that exists) the call says.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import os
import reprlib
import threading
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeAlias, TypeVar, Union

from annotated_types import Ge as AtLeast
from annotated_types import Interval, Predicate

from qkscope.errors import BadInput, check_name_length

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]

Count = Annotated[int, AtLeast(1)]
Prompts = Annotated[int, Interval(ge=1, le=1_000_000)]
Natural = Annotated[int, AtLeast(0)]
Share = Annotated[float, Interval(ge=0, le=1)]

LARGEST_SEED = 2**62  # generators take 64 bits, and what is derived from a seed must fit too
_AS_THEY_ARE = (int, float, bool, Any, object, types.NoneType, Literal, Callable)
_FILE_NAME = Annotated[str, Predicate(lambda name: "\0" not in name)]
_LOOKED_AT = 1024  # items of a list: units by the million are drawn as they are read


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
    function = function if "." in function.__qualname__ else _counted(function)
    reader = functools.cache(
        lambda: _reader(function)
    )  # at the first call: annotations may name what is imported later

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        own, named = reader()(args, kwargs)
        try:
            return function(*own, **named)
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


# ---------------------------------------------------------------- a call's arguments


def _reader(function: Callable[..., Any]) -> Callable[[Args, Kwargs], tuple[Args, Kwargs]]:
    """What takes a call's arguments and gives them back, numbers of numpy and torch as Python's, or refuses them."""
    from pydantic import ValidationError, validate_call

    def given(*args: Any, **kwargs: Any) -> None: ...

    signature, hints = inspect.signature(function), _hints(function)
    if hints.get("seed") is int:
        hints["seed"] = Annotated[int, Interval(ge=-LARGEST_SEED, le=LARGEST_SEED)]
    typed = {name: _typed(hints.get(name, Any)) for name in signature.parameters}
    parameters = [parameter.replace(annotation=typed[name]) for name, parameter in signature.parameters.items()]
    vars(given)["__signature__"], given.__annotations__ = signature.replace(parameters=parameters), typed
    check = validate_call(config={"strict": True})(given)

    def errors_of(args: Args, kwargs: Kwargs) -> list[Any]:
        try:
            check(*args, **kwargs)
        except ValidationError as error:
            return error.errors(include_url=False)
        return []

    def read(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if not (errors := errors_of(args, kwargs)):
            return args, kwargs
        wrong = {error["loc"][0] for error in errors}
        own = tuple(_plain(value) if place in wrong else value for place, value in enumerate(args))
        named = {name: _plain(value) if name in wrong else value for name, value in kwargs.items()}
        if not (still := {error["loc"][0] for error in errors_of(own, named)}):
            return own, named
        errors, shown = [error for error in errors if error["loc"][0] in still], _shown(function, args)
        raise BadInput(_misfit(function, shown, errors) or _mistake(function, shown, errors))

    return read


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as Python's, also in dicts and lists, which are made tuples."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Annotations, each read by itself: where one names what only a type checker sees, the others still count."""
    found: dict[str, Any] = {}
    inner: Any = inspect.unwrap(function)
    for name, hint in inner.__annotations__.items():
        one = type("One", (), {"__annotations__": {name: hint}})
        with suppress(NameError, TypeError, SyntaxError):
            found |= typing.get_type_hints(one, globalns=inner.__globals__, include_extras=True)
    return found


def _typed(hint: Any, called: str = "") -> Any:
    """An annotation as pydantic checks it: what is one of a class is not looked into."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    outer = origin or hint
    if origin is Annotated:
        return Annotated[_typed(inside[0], next((by for by in inside[1:] if isinstance(by, str)), "")), *inside[1:]]
    if Path in inside:
        inside = tuple(_FILE_NAME if part is str else part for part in inside)
    parts = tuple(part if part is Ellipsis else _typed(part) for part in inside)
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, parts)
    if outer in _AS_THEY_ARE or not isinstance(outer, type):
        return hint
    if outer is tuple and Ellipsis not in inside:
        return outer[parts]
    if issubclass(outer, Mapping):
        return _many(dict, parts, Mapping, called or "a dict")
    if outer in (list, tuple, Sequence, Iterable):
        wanted = Iterable if outer is Iterable else Sequence
        return _many(list, parts[:1], wanted, called or f"a list{_ITEMS.get(inside[:1], '')}")
    return _one(outer)


def _one(cls: Any) -> Any:
    """What is one of a class, or a tensor of a shape as jaxtyping has it."""
    from pydantic import GetPydanticSchema
    from pydantic_core.core_schema import custom_error_schema, is_instance_schema

    comes, article = vars(cls).get("comes_from"), "an" if cls.__name__[0] in "AEIOU" else "a"
    called = _CLASSES.get(cls) or f"{article} {cls.__name__}" + (f" ({comes})" if comes else "")
    if hasattr(cls, "dim_str"):
        sorts = {"Float": "floating-point ", "Int": "whole-number ", "Bool": "true-or-false "}
        sort = sorts.get(cls.__name__.split("[")[0], "")
        called = f"a {sort}tensor of shape ({', '.join(cls.dim_str.split())})"
    wanted = is_instance_schema(os.PathLike if cls is Path else cls)
    schema = custom_error_schema(wanted, "kind", custom_error_message="{kind}", custom_error_context={"kind": called})
    return Annotated[Any, GetPydanticSchema(lambda *_: schema)]


def _many(plain: Any, parts: tuple[Any, ...], wanted: type, called: str) -> Any:
    """A list or a dict, of which the first items are looked at: others may be made as they are read."""
    from pydantic import WrapValidator
    from pydantic_core import PydanticCustomError

    def check(value: Any, look: Callable[[Any], Any]) -> None:
        other = isinstance(value, str | bytes | bytearray) or isinstance(value, Mapping) != (wanted is Mapping)
        if other or not isinstance(value, wanted):
            raise PydanticCustomError("kind", "{kind}", {"kind": called})
        if isinstance(value, Mapping):
            look(dict(islice(value.items(), _LOOKED_AT)))
        elif isinstance(value, list | tuple):
            look(list(value[:_LOOKED_AT]))

    return Annotated[plain[parts] if parts else plain, WrapValidator(check)]


# ---------------------------------------------------------------- sentences

_CLASSES: dict[Any, str] = {str: "a text", bytes: "bytes", Path: "a path", type: "a class"}
_ITEMS: dict[Any, str] = {(str,): " of texts", (int,): " of whole numbers", (float,): " of numbers"}
_RANGES = {"greater_than_equal": "at least {ge}", "less_than_equal": "at most {le}", "literal_error": "{expected}"}
_SHOULD_BE = _RANGES | {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "True or False",
    "callable_type": "something to call",
    "tuple_type": "a tuple",
    "missing": "longer",
    "too_long": "shorter",
    "predicate_failed": "a file's name",
    "kind": "{kind}",
}
_MISFITS = {
    "unexpected_keyword_argument": "takes no {!r}",
    "unexpected_positional_argument": "takes at most {} unnamed values",
    "multiple_argument_values": "got {} twice, with and without its name",
    "missing": "needs {}",
}


def _misfit(function: Callable[..., Any], shown: str, errors: list[Any]) -> str:
    """Which name is unknown, given twice or missing, or that there are too many values; empty if they fit."""
    parameters = inspect.signature(function).parameters
    takes = [n for n, p in parameters.items() if n not in ("self", "cls") and p.kind < p.VAR_KEYWORD]
    for kind, says in _MISFITS.items():
        wrong = [error["loc"][0] for error in errors if error["type"].startswith(kind) and len(error["loc"]) == 1]
        if not wrong:
            continue
        free = sum(parameters[name].kind < inspect.Parameter.KEYWORD_ONLY for name in takes)
        what = " and ".join(wrong) if isinstance(wrong[0], str) else free
        near = difflib.get_close_matches(str(wrong[0]), takes, n=1) if kind.endswith("keyword_argument") else []
        listed = f"it takes {', '.join(takes) or 'nothing'}"
        return f"{shown} {says.format(what)}: {f'did you mean {near[0]}' if near else listed}."
    return ""


def _mistake(function: Callable[..., Any], shown: str, errors: list[Any]) -> str:
    """What the first wrong value, or the part of it that is wrong, should be: of its kind, or in its range."""
    place = errors[0]["loc"][0]
    names = [n for n, p in inspect.signature(function).parameters.items() if p.kind < p.KEYWORD_ONLY]
    name = names[min(place, len(names) - 1)] if isinstance(place, int) else place
    wrong = [error for error in errors if error["loc"][0] == place]
    deepest = max(len(error["loc"]) for error in wrong)
    wrong = [error for error in wrong if len(error["loc"]) == deepest]
    kinds = dict.fromkeys(_SHOULD_BE[error["type"]].format(**error.get("ctx", {})) for error in wrong)
    of = "is" if {error["type"] for error in wrong} <= set(_RANGES) else f"of {shown} should be"
    return f"{name} {of} {' or '.join(kinds)}, but got {came(wrong[0]['input'])}."


def _shown(function: Callable[..., Any], args: Args) -> str:
    """What a call is called: ``decompose``, ``Scope.encode``, or ``Example`` for its constructor."""
    name = function.__name__.removesuffix("_task")  # of the task whose name is taken by Python's filter
    if not args or next(iter(inspect.signature(function).parameters), "") not in ("self", "cls"):
        return name
    owner = args[0] if isinstance(args[0], type) else type(args[0])
    return f"{owner.__name__}.{name}".removesuffix(".__init__")


class _Came(reprlib.Repr):
    """A value in a message: itself where it is short and plain, otherwise what it is."""

    def repr_instance(self, x: Any, level: int) -> str:
        """What is not one of Python's own kinds, or a number."""
        if x is None or isinstance(x, bytes | bool | float | complex):
            return repr(x)[: self.maxstring]
        return f"the class {x.__name__}" if isinstance(x, type) else type(x).__name__

    def repr_Tensor(self, x: Any, level: int) -> str:
        """Its shape and type: nobody reads its numbers."""
        what = "an array" if type(x).__name__ == "ndarray" else "a tensor"
        return f"{what} of shape {tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}"

    repr_ndarray = repr_Parameter = repr_Tensor


_CAME = _Came()
_CAME.maxstring, _CAME.maxlist, _CAME.maxtuple, _CAME.maxdict, _CAME.maxlevel = 60, 4, 4, 3, 2
came = _CAME.repr

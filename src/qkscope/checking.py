"""Public calls checked against their own annotations by pydantic: a value of another kind is one
sentence.

`checked_call` wraps a function, `checked_class` a class with its public methods. Numbers, texts and
truth values are taken strictly (numpy's and torch's count as Python's), a list serves for a tuple,
and of any other class an instance is wanted. Ranges are annotations too: `Count`, `Natural`,
`Share`, ``Annotated[float, AtLeast(2)]``. What cannot be told from one value (a shape, a name that
exists) the call says.
"""

from __future__ import annotations

import errno
import functools
import inspect
import operator
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, cast

from annotated_types import Ge as AtLeast  # noqa: F401  others take it from here
from annotated_types import Interval

from qkscope.errors import BadInput

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")
C = TypeVar("C", bound=type)

#: A million of anything is asked for by mistake, and would run for hours or until memory ends.
Count = Annotated[int, Interval(ge=1, le=1_000_000)]
Natural = Annotated[int, Interval(ge=0, le=1_000_000)]
Share = Annotated[float, Interval(ge=0, le=1)]
#: Generators take 64 bits, and what is derived from a seed must fit too.
Seed = Annotated[int, Interval(ge=-(2**62), le=2**62)]

_CONTAINERS = (list, tuple, dict, set, Sequence, Mapping)
_AS_THEY_ARE = (Any, Literal, Callable, Path, None, types.NoneType)
_WORDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "'str' instances are not allowed as a Sequence value": "a list",
}


class _Verb(threading.local):
    """The public call that a caller is waiting for: how deep calls are nested in it, and its
    number.
    """

    depth = 0
    number = 0


_VERB = _Verb()


def verb_under_way() -> int | None:
    """A number for the public call that a caller is waiting for; None outside of any.

    Nobody changes a model while they wait, so what takes long to ask of it is asked once for each.
    """
    return _VERB.number if _VERB.depth else None


def checked_call(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it refuses what its annotations do not allow.

    >>> @checked_call
    ... def half(n: Count) -> float:
    ...     return n / 2
    >>> half("six")
    Traceback (most recent call last):
    qkscope.errors.BadInput: n of half should be a valid integer, but got 'six'.
    >>> half(0)
    Traceback (most recent call last):
    qkscope.errors.BadInput: n of half should be at least 1, but got 0.
    """
    reader = functools.cache(
        lambda: _reader(function)
    )  # annotations may name what is imported later

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        values, named = reader()(*args, **kwargs)
        if _VERB.depth:
            return function(*values, **named)
        _VERB.number += 1
        _VERB.depth = 1
        try:
            with _plain_torch():
                return function(*values, **named)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise BadInput(
                f"a name is longer than files have: {cut(str(error.filename), 80)}."
            ) from None
        finally:
            _VERB.depth = 0

    return call


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Torch's modes as a program starts with them, whatever a caller has set.

    Without gradients, or in inference mode, a trace ends in an error of torch's; with a default
    dtype of float64 so does whatever adds two tensors; autocast moves an attention by .01.
    """
    torch = sys.modules.get("torch")
    with ExitStack() as stack:
        if torch is None:  # nobody has set a mode of it
            yield
            return
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            stack.enter_context(torch.enable_grad())
        accelerator = torch.accelerator.current_accelerator()
        for kind in {"cpu", accelerator.type if accelerator else "cpu"}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        dtype = torch.get_default_dtype()
        if dtype != torch.float32:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        yield


def checked_class(cls: C) -> C:
    """Decorate a class so that its constructor and public methods refuse what their annotations do
    not allow.
    """
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, classmethod | staticmethod):
            setattr(cls, name, type(member)(checked_call(member.__func__)))
        elif inspect.isfunction(member):
            setattr(cls, name, checked_call(member))
    return cls


def _reader(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that validates a call's arguments against its annotations, or refuses them
    in a sentence.
    """
    from pydantic import ValidationError, validate_call

    def given(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    inner: Any = inspect.unwrap(function)
    signature = inspect.signature(function)
    hints: dict[str, Any] = dict.fromkeys(signature.parameters, Any)
    for name in hints.keys() & inner.__annotations__.keys():
        with suppress(NameError):  # it names what only a type checker sees
            alone = types.SimpleNamespace(__annotations__={name: inner.__annotations__[name]})
            hints[name] = _typed(
                typing.get_type_hints(alone, inner.__globals__, include_extras=True)[name]
            )
    parameters = [
        parameter.replace(annotation=hints[name])
        for name, parameter in signature.parameters.items()
    ]
    vars(given)["__signature__"], given.__annotations__ = (
        signature.replace(parameters=parameters),
        hints,
    )
    check = validate_call(given)

    def read(*args: Any, **kwargs: Any) -> Any:
        try:
            return check(*args, **kwargs)
        except ValidationError as error:
            errors = error.errors(include_url=False)
        shown = function.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]
        place = errors[0]["loc"][0]
        if (
            "argument" in errors[0]["type"]
        ):  # one too many or too few; the live page sends what a browser sends
            raise BadInput(f"{shown}: {errors[0]['msg'].lower()} {place!r}.")
        here = [wrong for wrong in errors if wrong["loc"][0] == place]
        deepest = [
            wrong for wrong in here if len(wrong["loc"]) == max(len(wrong["loc"]) for wrong in here)
        ]
        name = list(hints)[min(place, len(hints) - 1)] if isinstance(place, int) else place
        wanted = " or ".join(
            dict.fromkeys(wrong["msg"].removeprefix("Input should be ") for wrong in deepest)
        )
        for theirs, ours in _WORDS.items():
            wanted = wanted.replace(theirs, ours)
        raise BadInput(
            f"{name} of {shown} should be {wanted}, but got {came(deepest[0]['input'])}."
        )

    return read


def _typed(hint: Any) -> Any:
    """An annotation as pydantic checks it: scalars strictly, containers item by item, classes by
    their instances.
    """
    from pydantic import BeforeValidator, InstanceOf, Strict

    origin = typing.get_origin(hint)
    inside = typing.get_args(hint)
    if origin is Annotated:
        return Annotated[_typed(inside[0]), *inside[1:]]
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(_typed, inside))
    if hint in (int, float, bool, str, bytes):
        return Annotated[hint, Strict(), BeforeValidator(_plain)]
    if (origin or hint) in _AS_THEY_ARE or not isinstance(origin or hint, type):
        return hint
    if origin in _CONTAINERS and inside:
        return origin[tuple(part if part is ... else _typed(part) for part in inside)]
    return cast(Any, InstanceOf)[origin or hint]


def _plain(value: Any) -> Any:
    """A number of numpy's or torch's as Python's."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def grouped(items: Iterable[T], by: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by what they have in common, groups in the order of their first items.

    >>> grouped(["hat", "jam", "hut"], lambda word: word[0])
    {'h': ['hat', 'hut'], 'j': ['jam']}
    """
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(by(item), []).append(item)
    return groups


def came(value: Any) -> str:
    """A value in a message: itself, cut where it is long; of an array its shape and type."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"
    return cut(" ".join(repr(value).split()), 80)


def cut(text: str, most: int) -> str:
    """The text, or as many of its characters as that, the last one an ellipsis.

    >>> cut("unbelievable", 8)
    'unbelie…'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"

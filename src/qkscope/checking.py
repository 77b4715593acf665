"""Public calls checked against their own annotations by pydantic; a misfit is one sentence.

`checked_call` wraps a function, `checked_class` a class with its public methods. Numbers, texts and
truth values are taken strictly (numpy's and torch's count as Python's), a list serves for a tuple,
and of any other class an instance is wanted. Ranges are annotations too: `Count`, `Natural`,
`Share`, ``Annotated[float, AtLeast(2)]``. What cannot be told from one value (a shape, a name that
exists) the function checks itself.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, cast

from annotated_types import Ge as AtLeast  # noqa: F401  others take it from here
from annotated_types import Interval

from qkscope.errors import BadInput
from qkscope.text import abbreviate, describe

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)

#: A million of anything is asked for by mistake, and would run for hours or until memory ends.
Count = Annotated[int, Interval(ge=1, le=1_000_000)]
Natural = Annotated[int, Interval(ge=0, le=1_000_000)]
Share = Annotated[float, Interval(ge=0, le=1)]
#: Generators take 64 bits, and what is derived from a seed must fit too.
Seed = Annotated[int, Interval(ge=-(2**62), le=2**62)]

_SCALARS = (int, float, bool, str, bytes)
_CONTAINERS = (list, tuple, dict, set, Sequence, Mapping)
_UNCHANGED = (Any, Literal, Callable, Path, None, types.NoneType)
#: Pydantic's words, and those that a user reads.
_WORDING = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "'str' instances are not allowed as a Sequence value": "a list",
}


class _PublicCall(threading.local):
    """The public call that this thread is in; `with` enters one, maybe inside another."""

    depth = 0
    number = 0

    def __enter__(self) -> bool:
        """Enter a call; whether it is the outermost one."""
        if self.depth == 0:
            self.number += 1
        self.depth += 1
        return self.depth == 1

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1


_PUBLIC_CALL = _PublicCall()


def outermost_call() -> int | None:
    """Number of the outermost public call that this thread is in; None outside of any.

    A cache key for what cannot change while a caller waits, such as the hash of a model's weights:
    calls inside one another share the number, the next call of the user has another.
    """
    if _PUBLIC_CALL.depth == 0:
        return None
    return _PUBLIC_CALL.number


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

    @functools.cache
    def validator() -> Callable[..., Any]:
        """Made at the first call: annotations may name what is imported later."""
        return _validator(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        validate = validator()
        values, options = validate(*args, **kwargs)
        with _PUBLIC_CALL as is_outermost:
            if not is_outermost:
                return function(*values, **options)
            return _from_outside(function, values, options)

    return call


def _from_outside(function: Callable[..., T], values: Any, options: Any) -> T:
    """Call a function as its user does: torch's modes plain, and names too long a sentence."""
    try:
        with _plain_torch():
            return function(*values, **options)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = abbreviate(str(error.filename), 80)
        raise BadInput(f"a name is longer than files have: {name}.") from None


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
    """Decorate a class so that its constructor and public methods check their arguments."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, classmethod | staticmethod):
            wrap = type(member)
            setattr(cls, name, wrap(checked_call(member.__func__)))
        elif inspect.isfunction(member):
            setattr(cls, name, checked_call(member))
    return cls


def _validator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that returns a call's arguments as annotated, or refuses them."""
    from pydantic import ValidationError, validate_call

    def arguments(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    signature = inspect.signature(function)
    hints = _hints(function, signature)
    parameters = []
    for name, parameter in signature.parameters.items():
        parameters.append(parameter.replace(annotation=hints[name]))
    # pydantic reads the signature of what it wraps: give it the function's
    vars(arguments)["__signature__"] = signature.replace(parameters=parameters)
    arguments.__annotations__ = hints
    check = validate_call(arguments)

    def validate(*args: Any, **kwargs: Any) -> Any:
        try:
            return check(*args, **kwargs)
        except ValidationError as error:
            errors = error.errors(include_url=False)
        _refuse(function, list(hints), errors)

    return validate


def _hints(function: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """Type hints of a function's parameters as pydantic is to check them; Any where unknown."""
    inner: Any = inspect.unwrap(function)
    hints: dict[str, Any] = dict.fromkeys(signature.parameters, Any)
    for name in hints.keys() & inner.__annotations__.keys():
        annotation = {name: inner.__annotations__[name]}
        holder = types.SimpleNamespace(__annotations__=annotation)
        with suppress(NameError):  # it names what only a type checker sees
            resolved = typing.get_type_hints(holder, inner.__globals__, include_extras=True)
            hints[name] = _checkable(resolved[name])
    return hints


def _refuse(function: Callable[..., Any], parameters: list[str], errors: Sequence[Any]) -> None:
    """Raise `BadInput` for the first argument that pydantic found wrong."""
    shown = function.__qualname__.removesuffix(".__init__")
    shown = shown.rpartition("<locals>.")[2].replace("Runner.", "Scope.")
    place = errors[0]["loc"][0]
    # one argument too many or too few: the live page sends what a browser sends
    if "argument" in errors[0]["type"]:
        problem = errors[0]["msg"].lower()
        raise BadInput(f"{shown}: {problem} {place!r}.")
    at_place = [error for error in errors if error["loc"][0] == place]
    depth = max(len(error["loc"]) for error in at_place)
    deepest = [error for error in at_place if len(error["loc"]) == depth]
    name = place
    if isinstance(place, int):
        name = parameters[min(place, len(parameters) - 1)]
    kinds = [error["msg"].removeprefix("Input should be ") for error in deepest]
    wanted = " or ".join(dict.fromkeys(kinds))
    for pydantic_words, plain_words in _WORDING.items():
        wanted = wanted.replace(pydantic_words, plain_words)
    given = at_place[0]["input"]
    if isinstance(given, list | tuple) and any("of Head" in kind for kind in kinds):
        raise BadInput(
            f"{shown} takes one head, like 'L18H6', but got {len(given)}: call it for each in turn."
        )
    value = describe(deepest[0]["input"])
    raise BadInput(f"{name} of {shown} should be {wanted}, but got {value}.")


def _checkable(hint: Any) -> Any:
    """Turn an annotation into what pydantic is to check.

    Scalars are checked strictly, containers item by item, and other classes by their instances.
    """
    from pydantic import BeforeValidator, InstanceOf, Strict

    origin = typing.get_origin(hint)
    inside = typing.get_args(hint)
    base = origin or hint
    if origin is Annotated:
        return Annotated[_checkable(inside[0]), *inside[1:]]
    if origin in (Union, types.UnionType):
        options = map(_checkable, inside)
        return functools.reduce(operator.or_, options)
    if hint in _SCALARS:
        return Annotated[hint, Strict(), BeforeValidator(_python_number)]
    if base in _UNCHANGED or not isinstance(base, type):
        return hint
    if origin in _CONTAINERS and inside:
        items = tuple(part if part is ... else _checkable(part) for part in inside)
        return origin[items]
    return cast(Any, InstanceOf)[base]


def _python_number(value: Any) -> Any:
    """Turn a number of numpy's or torch's into Python's; anything else passes through."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value

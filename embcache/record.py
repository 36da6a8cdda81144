"""`record`: a frozen dataclass whose methods are shared, not compiled for each class.

The standard decorator writes and compiles six functions a class, about a millisecond: most of what importing the torch-free
half would take. A record is a dataclass to whoever looks (`dataclasses.fields`, `replace`, `asdict`, ``match``, pickling),
and may be the base of one.
"""

from __future__ import annotations

import inspect
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from reprlib import recursive_repr
from typing import Any, TypeVar, dataclass_transform

__all__ = ["record"]

T = TypeVar("T")


class _Signature:
    """What `inspect.signature` and ``help`` show of a record's constructor, made when they ask."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if getattr(owner, "__init__") is not _init:  # noqa: B009 - mypy takes the attribute for unsound
            raise AttributeError("__signature__")
        parameters = []
        for one in fields(owner):
            kind = inspect.Parameter.KEYWORD_ONLY if one.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
            default = inspect.Parameter.empty if one.default is MISSING else one.default
            parameters.append(inspect.Parameter(one.name, kind, default=default, annotation=one.type))
        return inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))


def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    owner, values = f"{type(self).__name__}.__init__()", vars(self)
    names = type(self).__match_args__
    if len(args) > len(names):
        raise TypeError(f"{owner} takes at most {len(names)} positional arguments but {len(args)} were given")
    for name, value in zip(names, args, strict=False):
        if name in kwargs:
            raise TypeError(f"{owner} got multiple values for argument {name!r}")
        values[name] = value
    missing = []
    for one in fields(self):
        if one.name in kwargs:
            values[one.name] = kwargs.pop(one.name)
        elif one.name not in values:
            if one.default is MISSING:
                missing.append(one.name)
            values[one.name] = one.default
    if kwargs:
        raise TypeError(f"{owner} got an unexpected keyword argument {next(iter(kwargs))!r}")
    if missing:
        raise TypeError(f"{owner} missing {len(missing)} required arguments: {', '.join(map(repr, missing))}")
    check = getattr(self, "__post_init__", None)
    if check is not None:
        check()


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _values(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, one.name) for one in fields(self) if one.compare)


def _eq(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _is_kept(self: Any, name: str) -> bool:
    """Whether an attribute may not change: a field, or any of a record's own (a subclass that is none may have others)."""
    return "__dataclass_fields__" in vars(type(self)) or any(one.name == name for one in fields(self))


def _setattr(self: Any, name: str, value: object) -> None:
    if _is_kept(self, name):
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _delattr(self: Any, name: str) -> None:
    if _is_kept(self, name):
        raise FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


_METHODS: dict[str, Any] = {
    "__init__": _init,
    "__repr__": _repr,
    "__eq__": _eq,
    "__hash__": _hash,
    "__setattr__": _setattr,
    "__delattr__": _delattr,
    "__signature__": _Signature(),
}


@dataclass_transform(eq_default=True, frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass with ``__eq__`` and ``__hash__`` over its fields.

    As ``dataclass(frozen=True)``, except that ``default_factory``, ``InitVar`` and fields that are not of the constructor are
    not served, and that its methods are the same functions for all records. Records may derive from records.
    """
    above = [vars(base)["__dataclass_params__"] for base in cls.__mro__[1:] if "__dataclass_params__" in vars(base)]
    for params in above:  # that a frozen class has frozen bases only is checked, and true: the methods below see to it
        params.frozen = False
    made = dataclass(init=False, repr=False, eq=False)(cls)
    for params in (*above, vars(made)["__dataclass_params__"]):
        params.init = params.repr = params.eq = params.frozen = True
    for name, method in _METHODS.items():
        setattr(made, name, method)
    return made

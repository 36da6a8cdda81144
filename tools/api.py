#!/usr/bin/env python3
"""Writes docs/api.md: every public name, how it is called, and the first sentence of what it says of itself.

A test fails where the page is not what this makes of the code: run ``python tools/api.py`` and look at the difference.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
ROOMS = {
    "embcache": "`import embcache as ec`. Importing it does not import torch; names that need it load it when they are first used.",
    "embcache.torchrec": "TorchRec's and RecSDK's names; needs TorchRec ([migrate.md](migrate.md)).",
    "embcache.distributed": "Tables that many ranks share, on `torch.distributed`.",
    "embcache.metrics": "Figures for Prometheus and TensorBoard, without torch.",
    "embcache.checkpoint": "What `save` and `restore` stand on, without torch: for tools and other writers.",
}
OWN = "embcache"
# Rooms whose classes are listed without their methods: tools use them, and read their docstrings.
BRIEF = ("embcache.checkpoint",)
# What rooms of the package ask of each other's objects: no underscore, since another room calls it, and not for users.
INSIDE = frozenset(
    "abandon before_change check_between_steps complete_abandoned compute compute_kernels core count count_update current_spec end_step feed "
    "finish_late flush_table fresh_planner fresh_table group_lookup held hold initial_state input_dist let_slots_move load_optimizer_state "
    "load_weight look_up lookups moved needs_labels needs_timestamps next_rule note_in_directories note_optimizer note_saved optimizer_state "
    "options output_dist plan_ahead plan_and_move pool prepare read_rows reserve_forwards saved_created saved_managers settle shard "
    "shardable_parameters shared sharding_types shift_slots state_widths take_back take_over update whole_weights withdraw work".split()
)
HEAD = """# Every public name

Made by `tools/api.py` from the code; a test compares them. Docstrings say all of it: shapes, dtypes, units, errors, thread
safety, and an example (`python -c "import embcache as ec; help(ec.TrainPipeline)"`). Methods that only rooms of the package call of each
other's objects are left out.
"""


def first_sentence(thing: Any) -> str:
    """Of its docstring, on one line."""
    text = inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0]
    line = " ".join(text.split()).replace("``", "`")
    return re.split(r"(?<=\.) (?=[A-Z])", line)[0]


def called(name: str, thing: Any) -> str:
    """`name` with its parameters and their defaults, without types."""
    try:
        # A metaclass's own __call__ (TorchRec has one) would hide them.
        signature = inspect.signature(thing.__init__ if isinstance(thing, type) else thing)
    except (TypeError, ValueError):
        return name
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    return f"{name}{signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)}"


def is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == OWN


def members(kind: type) -> dict[str, Any]:
    """Public methods and properties that it has of this package's classes, its own first."""
    found: dict[str, Any] = {}
    for part in kind.__mro__:
        if is_ours(part):
            for name, member in vars(part).items():
                documented = getattr(member, "__doc__", None)
                hidden = name.startswith("_") or name in INSIDE
                if not hidden and documented and is_member(member) and name not in found:
                    found[name] = member
    return found


def is_member(member: Any) -> bool:
    return isinstance(member, (property, staticmethod, classmethod)) or inspect.isroutine(member)


def lines_of(room: str, name: str, thing: Any, seen: dict[int, str]) -> list[str]:
    """The line of a name, and below it those of its members. `seen`: who has had a member, by its id."""
    says = first_sentence(thing)
    if isinstance(thing, enum.EnumMeta):
        return [f"- `{name}`: {says} Members: {', '.join(f'`{one.name}`' for one in thing)}."]
    if isinstance(thing, type) and issubclass(thing, Exception):
        return [f"- `{name}` ({', '.join(f'`{base.__name__}`' for base in thing.__bases__)}): {says}"]
    lines = [f"- `{called(name, thing)}`: {says}"]
    if not isinstance(thing, type) or room in BRIEF:
        return lines
    others: dict[str, list[str]] = {}
    for member_name, member in members(thing).items():
        owner = seen.setdefault(id(member), name)
        if owner != name:
            others.setdefault(owner, []).append(f"`.{member_name}`")
        elif isinstance(member, property):
            lines.append(f"    - `.{member_name}`: {first_sentence(member)}")
        else:
            function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
            lines.append(f"    - `.{called(member_name, function)}`: {first_sentence(function)}")
    return lines + [f"    - {', '.join(names)}: as of `{owner}`" for owner, names in others.items()]


def page() -> str:
    """The whole page."""
    lines, seen = [HEAD], dict[int, str]()
    for room, says in ROOMS.items():
        module = import_module(room)
        lines += [f"## `{room}`", "", says, ""]
        for name in sorted(module.__all__, key=str.lower):
            lines += lines_of(room, name, getattr(module, name), seen)
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE}: {len(PAGE.read_text().splitlines())} lines", file=sys.stderr)

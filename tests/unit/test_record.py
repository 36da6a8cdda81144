"""Records are frozen dataclasses to whoever looks at them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from typing import ClassVar

import pytest

import embcache as ec
from embcache.record import record


@record
class Point:
    """A record with everything that records serve."""

    kind: ClassVar[str] = "point"
    x: float
    y: float = 2.0
    tags: list[str] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", float(self.x))


@record
class Point3(Point):
    """A record of a record."""

    z: float = 3.0


@dataclasses.dataclass(frozen=True)
class Reference:
    """What `Point` should be like."""

    kind: ClassVar[str] = "point"
    x: float
    y: float = 2.0
    tags: list[str] | None = dataclasses.field(default=None, kw_only=True)


def test_values_come_by_position_name_and_default():
    assert (Point(1).x, Point(1).y, Point(1).tags) == (1.0, 2.0, None)
    point = Point3(1, z=9, tags=["a"])
    assert (point.x, point.y, point.z, point.tags, point.kind) == (1.0, 2.0, 9, ["a"], "point")
    assert type(point.x) is float  # checked by the base


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 2, 3), {}), ((1,), {"x": 2}), ((1,), {"w": 2}), ((), {"y": 1, "tags": None})],
)
def test_bad_calls_are_type_errors_as_of_a_dataclass(args, kwargs):
    with pytest.raises(TypeError) as expected:
        Reference(*args, **kwargs)
    with pytest.raises(TypeError, match=r"Point\.__init__\(\)") as found:
        Point(*args, **kwargs)
    named = [name for name in ("'x'", "'w'") if name in str(expected.value)]
    assert all(name in str(found.value) for name in named)


def test_equal_by_fields_and_class():
    assert Point(1, 2) == Point(1.0) and hash(Point(1, 2)) == hash(Point(1.0))
    assert Point(1) != Point(2)
    assert Point(1) != Point3(1) and Point3(1) != Point(1) and Point(1) != (1.0, 2.0, None)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Point(1, tags=[]))
    assert {ec.Adam(): 1}[ec.Adam(lr=0.001)] == 1


def test_shown_as_a_dataclass():
    assert repr(Point(1)) == "Point(x=1.0, y=2.0, tags=None)"
    assert repr(ec.SGD(lr=0.5)) == "SGD(lr=0.5, weight_decay=0.0)"
    loop = Point(1, tags=[])
    loop.tags.append(loop)
    assert "..." in repr(loop)


def test_frozen():
    point = Point3(1)
    for name in ("x", "z", "other"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(point, name, 0)
    with pytest.raises(dataclasses.FrozenInstanceError, match="y"):
        del point.y
    assert point == Point3(1)


def test_subclasses_of_any_kind():
    class Plain(Point):
        def __init__(self, twice: float) -> None:
            super().__init__(2 * twice)
            self.extra = 5

    @dataclasses.dataclass(frozen=True)
    class Derived(ec.TableConfig):
        note: str = dataclasses.field(default="", kw_only=True)

    assert (Plain(2).x, Plain(2).extra) == (4.0, 5)
    assert list(inspect.signature(Plain).parameters) == ["twice"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plain(2).x = 1
    table = Derived("t", 4, note="mine")
    assert (table.note, table.feature_names) == ("mine", ["t"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.note = ""
    with pytest.raises(TypeError, match="frozen"):
        dataclasses.dataclass(type("Thawed", (Point,), {"__annotations__": {}}))


def test_the_tools_for_dataclasses_work():
    point = Point(1, tags=["a"])
    assert dataclasses.is_dataclass(Point)
    assert [one.name for one in dataclasses.fields(Point3)] == ["x", "y", "tags", "z"]
    assert dataclasses.asdict(point) == {"x": 1.0, "y": 2.0, "tags": ["a"]}
    assert dataclasses.replace(point, y=5) == Point(1, 5, tags=["a"])
    match point:
        case Point(x, y):
            assert (x, y) == (1.0, 2.0)
    expected = inspect.signature(Reference).parameters.values()
    found = inspect.signature(Point).parameters.values()
    assert [(p.name, p.kind, p.default) for p in found] == [(p.name, p.kind, p.default) for p in expected]


@pytest.mark.parametrize(
    "thing", [Point3(1, tags=["a"]), ec.Adam(betas=(0.5, 0.25)), ec.TableConfig("t", 4), ec.Uniform()]
)
def test_copied_and_pickled(thing):
    for other in (copy.copy(thing), copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))):
        assert other == thing and type(other) is type(thing) and vars(other) == vars(thing)


def test_importing_the_torch_free_half_compiles_no_methods():
    """The standard decorator execs six functions a class; records none."""
    script = (
        "import numpy, builtins\n"
        "real, ran = builtins.exec, []\n"
        "builtins.exec = lambda *args, **kwargs: (ran.append(args[0]), real(*args, **kwargs))[1]\n"
        "import embcache.table\n"
        "print(sum(isinstance(code, str) for code in ran))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["0"]

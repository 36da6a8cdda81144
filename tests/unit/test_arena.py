"""The arena: segments never move, grow log-linearly, and are refused instead of killing the process."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from embcache._core.arena import Arena, cgroup_room, memory_room
from embcache.errors import ConfigError, HostMemoryError, ShapeError

KIB, MIB, GIB = 2**10, 2**20, 2**30
STRIDES = [1, 4, 8, 16, 64, 192, 320, 4096, 32768, 98304]


@pytest.mark.parametrize("stride", STRIDES)
def test_segments_grow_from_64_kib_to_1_gib_with_little_slack(stride: int) -> None:
    arena = Arena(stride)
    total = 0
    for segment in range(400):
        rows, size = arena.plan(segment)
        assert rows * stride <= size < rows * stride + 4096
        assert rows & (rows - 1) == 0
        assert size <= GIB
        if segment == 0:
            assert 32 * KIB < rows * stride <= 64 * KIB or rows == 1
        if segment >= 16:
            assert rows <= total / 8
        total += rows
    assert arena.plan(399)[0] * stride > GIB / 2


@pytest.mark.parametrize("stride", [1, 8, 64, 192, 4096])
def test_addresses_do_not_overlap_and_do_not_move(stride: int) -> None:
    arena = Arena(stride)
    probes: dict[int, int] = {}
    ends: list[int] = []
    while len(arena.segments) < 35:
        arena.reserve(arena.rows + 1)
        ends.append(arena.rows)
        assert all(arena.address(row) == at for row, at in probes.items())
        first = ends[-2] if len(ends) > 1 else 0
        for row in (first, (first + arena.rows) // 2, arena.rows - 1):
            probes[row] = arena.address(row)
        rows = arena.segments[-1][0]
        assert arena.address(arena.rows - 1) - arena.address(first) == (rows - 1) * stride
    spans = sorted(
        (arena.address(start), arena.address(end - 1) + stride) for start, end in zip([0, *ends], ends, strict=False)
    )
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert arena.nbytes == sum(size for _, size in arena.segments)


def test_segments_of_2_mib_are_aligned_for_huge_pages() -> None:
    arena = Arena(64)
    arena.reserve(64 * MIB // 64)
    row = 0
    for rows, size in arena.segments:
        if size >= 2 * MIB:
            assert arena.address(row) % (2 * MIB) == 0
        row += rows


def test_elements_start_zeroed_and_keep_their_bytes() -> None:
    arena = Arena(8)
    arena.reserve(100_000)
    last = arena.rows - 1
    assert arena.read(last) == bytes(8)
    for row in (0, 8191, 8192, 65_535, last):
        arena.write(row, row.to_bytes(8, "little"))
    arena.reserve(1_000_000)
    assert [int.from_bytes(arena.read(row), "little") for row in (0, 8191, 8192, 65_535, last)] == [
        0,
        8191,
        8192,
        65_535,
        last,
    ]


def test_truncate_gives_memory_back() -> None:
    arena = Arena(64)
    arena.reserve(10_000)
    before = arena.segments
    missing = arena.missing(1_000_000)
    arena.reserve(1_000_000)
    assert arena.nbytes == sum(size for _, size in before) + missing
    arena.truncate(len(before))
    assert arena.segments == before and arena.rows == sum(rows for rows, _ in before)
    arena.truncate(0)
    assert (arena.rows, arena.nbytes) == (0, 0)


def test_more_than_the_machine_has_is_refused_and_changes_nothing() -> None:
    arena = Arena(4096)
    arena.reserve(10)
    before = arena.segments
    with pytest.raises(HostMemoryError, match="reserve fewer rows"):
        arena.reserve(memory_room() // 4096 + 2**18)
    assert arena.segments == before


@pytest.mark.parametrize(("stride", "rows"), [(1, 2**32 + 2**20), (32768, 2**17 + 5000)])
def test_case_3_rows_beyond_2_to_the_32_and_bytes_beyond_2_to_the_32(stride: int, rows: int) -> None:
    """Only address space is taken: what is not written costs no memory."""
    if memory_room() < 1.3 * rows * stride:
        pytest.skip(f"less than {1.3 * rows * stride / GIB:.1f} GiB may be mapped here")
    arena = Arena(stride)
    arena.reserve(rows)
    far = [rows - 1, rows - 2**16, rows // 2, 2**31 // stride, 2**32 // stride, 2**32 // stride + 1]
    for row in far:
        arena.write(row, (row % 251).to_bytes(1, "little") * stride)
    assert len({arena.address(row) for row in far}) == len(set(far))
    assert all(arena.read(row) == (row % 251).to_bytes(1, "little") * stride for row in far)
    assert arena.read(rows % 2**32 + 7) == bytes(stride)  # where a row number cut to 32 bits would have written
    assert sum(count for count, _ in arena.segments) == arena.rows >= rows


def test_bad_arguments() -> None:
    for stride in (0, -8, 2**40):
        with pytest.raises(ConfigError, match=str(stride)):
            Arena(stride)
    arena = Arena(8)
    arena.reserve(1)
    for row in (-1, arena.rows):
        with pytest.raises(ShapeError):
            arena.read(row)
    with pytest.raises(ShapeError, match="3 bytes"):
        arena.write(0, b"abc")
    with pytest.raises(ConfigError):
        arena.reserve(2**62)


def cgroup(directory: Path, limit: str, current: int, inactive: int, *, version: int = 2) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    (directory / names[0]).write_text(limit + "\n")
    (directory / names[1]).write_text(f"{current}\n")
    (directory / "memory.stat").write_text(f"anon 12\n{names[2]} {inactive}\nfile 7\n")


def test_cgroup_limits_of_every_ancestor_count(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    root = tmp_path / "root"
    assert cgroup_room(str(root), str(membership)) == 2**64 - 1
    cgroup(root / "outer" / "inner", "max", 5 * GIB, 0)
    assert cgroup_room(str(root), str(membership)) == 2**64 - 1
    cgroup(root / "outer", str(10 * GIB), 8 * GIB, GIB)
    assert cgroup_room(str(root), str(membership)) == 3 * GIB
    cgroup(root / "outer" / "inner", str(6 * GIB), 5 * GIB, 0)
    assert cgroup_room(str(root), str(membership)) == GIB
    cgroup(root, str(7 * GIB), 7 * GIB, 0)
    assert cgroup_room(str(root), str(membership)) == 0


def test_cgroup_of_the_first_version_counts(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("12:cpu,cpuacct:/a\n9:memory:/a/b\n0::/\n")
    cgroup(tmp_path / "root" / "memory" / "a", str(4 * GIB), GIB, 0, version=1)
    assert cgroup_room(str(tmp_path / "root"), str(membership)) == 3 * GIB
    assert cgroup_room(str(tmp_path / "root"), str(tmp_path / "absent")) == 2**64 - 1

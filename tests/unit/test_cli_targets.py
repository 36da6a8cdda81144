"""A command's target: the old one is there until the new one is, whole, whatever happens in between."""

from __future__ import annotations

import fcntl
import importlib.util
import io
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from embcache.checkpoint import Writer
from embcache.cli import main
from embcache.commands import targets
from embcache.commands.paths import CHECKPOINT, FILE, TABLE
from embcache.errors import ConfigError, LockedError
from embcache.table import EmbTable


def make(path: Path, value: float, rows: int = 2000) -> Path:
    with EmbTable("items", 8, directory=path) as table:
        table.assign(np.arange(rows), np.full((rows, 8), value, np.float32))
    return path


def value_of(path: Path) -> float:
    """The one value of the table in a directory; it must be whole."""
    with EmbTable("items", 8, directory=path) as table:
        table.check()
        weights = table.lookup(np.arange(len(table)), insert=False)
    assert len(np.unique(weights)) == 1
    return float(weights[0, 0])


def in_child(work: Callable[[], object]) -> int:
    """The exit code of `work` in a child; -9 where it was killed."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - to the child's end
            code = int(work() or 0)  # type: ignore[call-overload]
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("exchange", [True, False])
def test_force_replaces_a_whole_old_one_by_a_whole_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if not exchange:
        monkeypatch.setattr(targets, "_renameat2", lambda *rest: False)
    one, two = make(tmp_path / "one", 1.0), make(tmp_path / "two", 2.0, 500)
    assert main(["save", str(one), str(tmp_path / "saved")]) == 0
    assert main(["save", str(two), str(tmp_path / "saved")]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["restore", str(tmp_path / "saved"), str(tmp_path / "back")]) == 0 and value_of(tmp_path / "back") == 1
    assert main(["save", str(two), str(tmp_path / "saved"), "--force"]) == 0
    assert main(["restore", str(tmp_path / "saved"), str(tmp_path / "back")]) == 2 and value_of(tmp_path / "back") == 1
    assert main(["restore", str(tmp_path / "saved"), str(tmp_path / "back"), "--force"]) == 0
    assert value_of(tmp_path / "back") == 2
    assert sorted(os.listdir(tmp_path)) == ["back", "one", "saved", "two"]
    with targets.replacing(str(tmp_path / "new"), FILE, False) as content:
        Path(content).write_text("1")
    with targets.replacing(str(tmp_path / "new"), FILE, True) as content:
        Path(content).write_text("2")
    assert (tmp_path / "new").read_text() == "2"


def test_other_kinds_links_and_folders_in_use_are_never_replaced(tmp_path: Path) -> None:
    def attempt(name: str, kind: str, force: bool = True) -> None:
        with targets.replacing(str(tmp_path / name), kind, force) as content:
            os.mkdir(content)

    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thing").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    make(tmp_path / "table", 1.0)
    for name, kind in (("own", TABLE), ("link", TABLE), ("table", CHECKPOINT), ("table", FILE), ("pipe", FILE)):
        with pytest.raises(ConfigError):
            attempt(name, kind)
    with EmbTable("items", 8, directory=tmp_path / "table"), pytest.raises(LockedError, match="in use"):
        attempt("table", TABLE)
    assert value_of(tmp_path / "table") == 1
    attempt("empty", CHECKPOINT, False)


def test_what_appears_at_the_last_moment_is_not_replaced_without_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = targets._put

    def late(content: str, target: str, force: bool) -> None:
        monkeypatch.setattr(os.path, "lexists", lambda path: False)  # it looked, and then the file appeared
        Path(target).write_text("somebody's")
        real(content, target, force)

    monkeypatch.setattr(targets, "_put", late)
    with pytest.raises(ConfigError, match="appeared"), targets.replacing(str(tmp_path / "new"), FILE, False) as content:
        Path(content).write_text("ours")
    assert (tmp_path / "new").read_text() == "somebody's" and len(os.listdir(tmp_path)) == 1


def test_a_writer_of_the_old_checkpoint_and_a_replacement_exclude_each_other(tmp_path: Path) -> None:
    one = make(tmp_path / "one", 1.0)
    assert main(["save", str(one), str(tmp_path / "saved")]) == 0
    with Writer(tmp_path / "saved") as writer:
        writer.begin()
        assert main(["save", str(one), str(tmp_path / "saved"), "--force"]) == 3
    with targets.replacing(str(tmp_path / "saved"), CHECKPOINT, True) as content:
        os.mkdir(content)
        with Writer(tmp_path / "saved") as writer, pytest.raises(LockedError):
            writer.begin()


def test_a_lock_names_the_process_that_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a command that replaces a checkpoint, for a writer; and of a writer, for the command."""
    one = make(tmp_path / "one", 1.0)
    assert in_child(lambda: main(["save", str(one), str(tmp_path / "saved")])) == 0  # whose number is in the lock now
    with targets.replacing(str(tmp_path / "saved"), CHECKPOINT, True) as content:
        os.mkdir(content)
        with (
            Writer(tmp_path / "saved") as writer,
            pytest.raises(LockedError, match=rf"process {os.getpid()} ") as refusal,
        ):
            writer.begin()
        assert refusal.value.pid == os.getpid()
    assert main(["save", str(one), str(tmp_path / "other")]) == 0
    with Writer(tmp_path / "other") as writer:
        writer.begin()
        with pytest.raises(LockedError, match=rf"in use by process {os.getpid()}") as refusal:
            with targets.replacing(str(tmp_path / "other"), CHECKPOINT, True):
                pass
        assert refusal.value.pid == os.getpid()


def test_what_a_dead_command_left_goes_and_what_a_living_one_builds_stays(tmp_path: Path) -> None:
    one = make(tmp_path / "one", 1.0)
    dead, living, other = (tmp_path / f"{name}.embcache-{pid}" for name, pid in (("t", 1), ("t", 2), ("tt", 3)))
    for folder in (dead, living, other):
        (folder / "content").mkdir(parents=True)
    descriptor = os.open(living, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert main(["save", str(one), str(tmp_path / "t")]) == 0
    os.close(descriptor)
    assert (dead.exists(), living.exists(), other.exists()) == (False, True, True)


def test_a_full_disk_at_any_size_leaves_the_old_one(tmp_path: Path) -> None:
    """Files may not exceed a limit, which every command meets at some point: exit code 3, and nothing is left behind."""
    one = make(tmp_path / "one", 1.0, 20_000)
    assert main(["save", str(one), str(tmp_path / "saved")]) == 0
    for name in ("file.npz", "file.npy", "file.safetensors"):
        assert main(["export", str(one), str(tmp_path / name)]) == 0
    commands = [
        ["save", "one", "saved", "--force"],
        ["restore", "saved", "back"],
        ["compact", "saved", "--force"],
        ["export", "one", "file.npz", "--force"],
        ["export", "one", "file.npy", "--force"],
        ["export", "one", "file.safetensors", "--force"],
        ["import", "file.npz", "new"],
        ["import", "file.npy", "new", "--to", "directory"],
    ]
    if importlib.util.find_spec("pyarrow") is not None:
        commands.append(["export", "one", "file.parquet", "--json"])
    before = sorted(os.listdir(tmp_path))

    def limited(limit: int, command: list[str]) -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        os.chdir(tmp_path)
        said = sys.stdout = io.StringIO()
        code = main(command)
        return code if "--json" not in command or "DiskFullError" in said.getvalue() else 98

    for limit in (50_000, 200_000, 600_000):
        for command in commands:
            assert in_child(partial(limited, limit, command)) == 3, (limit, command)
            assert sorted(os.listdir(tmp_path)) == before, (limit, command)
    assert value_of(one) == 1 and main(["verify", str(tmp_path / "saved")]) == 0
    assert np.load(tmp_path / "file.npz")["weights"].shape == np.load(tmp_path / "file.npy").shape == (20_000, 8)


def renames(monkeypatch: pytest.MonkeyPatch, place: Path, at: Callable[[str], None]) -> None:
    """Without an exchange of `place / "saved"`; `at` is called before and after each of its two renames."""
    real = os.rename

    def rename(old: str, new: str) -> None:
        moves = os.path.basename(new) == "old"
        if moves or str(new) == str(place / "saved"):
            at("away" if moves else "into place")
        real(old, new)
        if moves or str(new) == str(place / "saved"):
            at("gone" if moves else "placed")

    monkeypatch.setattr(targets, "_renameat2", lambda *rest: False)
    monkeypatch.setattr(os, "rename", rename)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(5, "planted")])
@pytest.mark.parametrize("moment", ["away", "gone", "into place", "placed"])
def test_an_end_at_any_moment_of_an_exchange_in_two_steps_leaves_the_old_or_the_new(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    moment: str,
    error: BaseException | type[BaseException],
) -> None:
    for name, value in (("one", 1.0), ("two", 2.0)):
        make(tmp_path / name, value)
    assert main(["save", str(tmp_path / "one"), str(tmp_path / "saved")]) == 0

    def end(now: str) -> None:
        if now == moment:
            monkeypatch.undo()  # so that what is done about it is not interrupted again
            raise error

    renames(monkeypatch, tmp_path, end)
    code = main(["save", str(tmp_path / "two"), str(tmp_path / "saved"), "--force"])
    assert code == (130 if error is KeyboardInterrupt else 3)
    assert sorted(os.listdir(tmp_path)) == ["one", "saved", "two"]
    said = capsys.readouterr().err
    assert main(["restore", str(tmp_path / "saved"), str(tmp_path / "back")]) == 0
    assert value_of(tmp_path / "back") == (2 if moment == "placed" else 1)
    if error is KeyboardInterrupt:
        new = f"{tmp_path / 'saved'} is new, and whole; nothing else that existed before has changed"
        assert (new if moment == "placed" else "interrupted; nothing that existed before has changed") in said


@pytest.mark.parametrize("exchange", [True, False])
def test_ctrl_c_after_a_target_was_replaced_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], exchange: bool
) -> None:
    real = targets._put

    def put(*given: object) -> None:
        real(*given)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    one, two = make(tmp_path / "one", 1.0), make(tmp_path / "two", 2.0)
    assert main(["save", str(one), str(tmp_path / "saved")]) == 0
    monkeypatch.setattr(targets, "_put", put)
    if not exchange:
        monkeypatch.setattr(targets, "_renameat2", lambda *rest: False)
    assert main(["save", str(two), str(tmp_path / "saved"), "--force"]) == 130
    assert f"{tmp_path / 'saved'} is new, and whole; nothing else that existed" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["one", "saved", "two"]
    monkeypatch.undo()
    assert main(["restore", str(tmp_path / "saved"), str(tmp_path / "back")]) == 0 and value_of(tmp_path / "back") == 2


def test_ctrl_c_while_the_old_one_is_removed_says_that_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make(tmp_path / "one", 1.0)
    assert main(["save", str(one), str(tmp_path / "saved")]) == 0

    def interrupt(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", interrupt)
    assert main(["save", str(one), str(tmp_path / "saved"), "--force"]) == 130
    assert f"{tmp_path / 'saved'} is new, and whole" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["compact", str(tmp_path / "saved"), "--force"]) == 0
    assert sorted(os.listdir(tmp_path)) == ["one", "saved"]


def test_ctrl_c_says_nothing_of_what_a_command_before_had_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make(tmp_path / "one", 1.0)
    assert main(["save", str(one), str(tmp_path / "saved")]) == 0
    real = targets._put

    def die(*given: object) -> None:
        real(*given)  # type: ignore[arg-type]
        os._exit(9)

    monkeypatch.setattr(targets, "_put", die)
    assert in_child(lambda: main(["save", str(one), str(tmp_path / "saved"), "--force"])) == 9
    assert len(os.listdir(tmp_path)) == 3  # with what the dead one left

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(targets, "_put", interrupt)
    assert main(["save", str(one), str(tmp_path / "saved"), "--force"]) == 130
    assert "interrupted; nothing that existed before has changed" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["one", "saved"] and main(["verify", str(tmp_path / "saved")]) == 0


@pytest.mark.parametrize("dies", [False, True])
def test_an_old_one_whose_name_was_taken_meanwhile_is_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dies: bool
) -> None:
    """Between the two renames somebody saves to the target: in the same command, or before the one after a command that died there."""
    for name, value in (("one", 1.0), ("two", 2.0), ("three", 3.0)):
        make(tmp_path / name, value)
    assert main(["save", str(tmp_path / "one"), str(tmp_path / "saved")]) == 0

    def between(now: str) -> None:
        if now == "gone":
            if dies:
                os._exit(9)
            monkeypatch.undo()
            assert main(["save", str(tmp_path / "three"), str(tmp_path / "other")]) == 0
            os.rename(tmp_path / "other", tmp_path / "saved")

    def replace() -> int:
        renames(monkeypatch, tmp_path, between)
        return main(["save", str(tmp_path / "two"), str(tmp_path / "saved"), "--force"])

    if dies:
        assert in_child(replace) == 9 and not (tmp_path / "saved").exists()
        assert main(["save", str(tmp_path / "three"), str(tmp_path / "other")]) == 0
        os.rename(tmp_path / "other", tmp_path / "saved")
        assert main(["compact", str(tmp_path / "saved"), "--force"]) == 0
    else:
        assert replace() == 3
    assert sorted(os.listdir(tmp_path)) == ["one", "saved", "saved.old-1", "three", "two"]
    assert f"kept as {tmp_path / 'saved.old-1'}" in caplog.text
    for name, value in (("saved", 3), ("saved.old-1", 1)):
        assert main(["restore", str(tmp_path / name), str(tmp_path / f"back of {name}")]) == 0
        assert value_of(tmp_path / f"back of {name}") == value


def test_an_old_one_stays_where_it_is_not_known_that_the_new_one_has_its_name_durably(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = make(tmp_path / "one", 1.0), make(tmp_path / "two", 2.0)
    assert main(["save", str(one), str(tmp_path / "saved")]) == 0
    real = targets._sync

    calls: list[str] = []

    def sync(path: str) -> None:
        calls.append(path)
        if (
            path == str(tmp_path) and calls.count(path) == 2
        ):  # the first one is before the new one gets the name; one more would succeed
            raise OSError(5, "planted")
        real(path)

    monkeypatch.setattr(targets, "_sync", sync)
    assert main(["save", str(two), str(tmp_path / "saved"), "--force"]) == 3
    assert sorted(os.listdir(tmp_path)) == ["one", "saved", "saved.old-1", "two"] and "kept as" in caplog.text
    monkeypatch.undo()
    assert main(["verify", str(tmp_path / "saved.old-1")]) == 0

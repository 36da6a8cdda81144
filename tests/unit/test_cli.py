"""The `embcache` command: what it prints, and its exit codes."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embcache
from embcache.checkpoint import Finding, Reader, TableDescription, Writer
from embcache.cli import main, parser
from embcache.commands import findings
from embcache.commands.findings import examine
from embcache.commands.output import Output, code_of
from embcache.errors import (
    ConfigError,
    CorruptionError,
    DiskFullError,
    LockedError,
    StorageError,
    UncleanDirectoryError,
)
from embcache.table import EmbTable

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two generations, the second a delta, with two tables and a state."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    one, two = TableDescription("one", 4, 2, with_filter=True), TableDescription("two", 3, dtype="float16")
    rng = np.random.default_rng(0)
    for step in range(2):
        with Writer(path, chunk_bytes=1 << 16) as writer:
            writer.begin(parent=step or None, metadata={"step": step})
            keys = np.arange(3000 if step == 0 else 30)
            n = len(keys)
            weights = rng.standard_normal((n, 4)).astype(np.float32)
            writer.write_rows(one, keys, weights, np.ones((n, 2), np.float32), np.arange(n), np.arange(n) * 10)
            if step:
                writer.write_erased(one, np.arange(100, 110))
            else:
                writer.write_rows(two, keys[:50], rng.standard_normal((50, 3)).astype(np.float16))
                writer.write_state("dense", b"x" * 5000)
            writer.commit()
            writer.publish()
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of a command."""
    capsys.readouterr()
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out or "{}")


def test_list_says_what_each_generation_is(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = run(capsys, "list", saved)
    assert code == 0
    first, second = result["generations"]
    assert (first["kind"], first["parent"], first["tables"]) == ("full", None, {"one": 3000, "two": 50})
    assert (second["kind"], second["parent"], second["tables"]) == ("delta", 1, {"one": 30})
    assert main(["list", str(saved)]) == 0
    text = capsys.readouterr().out
    assert "delta on 1" in text and "3,050" in text and len(text.splitlines()) == 3


def test_list_names_what_is_damaged_and_exits_1(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "MANIFEST-0000000000000001").write_bytes(b"EMBCKPT\n" + bytes(100))
    code, result = run(capsys, "list", copy)
    assert code == 1
    assert "do not match their digest" in result["generations"][0]["problem"]
    assert "parent 1" in result["generations"][1]["problem"]


def test_paths_that_are_wrong_are_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "absent", tmp_path / "file", tmp_path, "", "a\0b"):
        code, result = run(capsys, "list", path)
        assert (code, result["error"]["type"]) == (2, "ConfigError")
        assert "give the path" in result["error"]["message"]


@pytest.mark.parametrize("command", ["list", "verify"])
def test_who_names_a_generation_where_all_are_meant_is_told(
    saved: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, result = run(capsys, command, f"{saved}@1")
    assert code == 2 and f"takes no generation: give {saved}, all" in result["error"]["message"]
    assert "takes no generation" not in run(capsys, command, f"{saved}2@1")[1]["error"]["message"]


def test_usage_of_the_parser_is_2_and_help_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["nonsense"]) == 2
    assert main(["--help"]) == 0
    assert "exit codes" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"embcache {embcache.__version__}\n"


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    (choices,) = (action.choices for action in parser()._actions if action.choices)
    assert isinstance(choices, dict)
    for name in choices:
        assert main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert len(text) > 400 and "--json" in text, name


def test_errors_have_the_exit_codes_that_the_help_says() -> None:
    assert code_of(CorruptionError("x")) == code_of(UncleanDirectoryError("x", directory="d")) == 1
    assert code_of(ConfigError("x")) == 2
    assert code_of(LockedError("x")) == code_of(DiskFullError(28, "x")) == code_of(MemoryError()) == 3
    assert code_of(ImportError("x")) == code_of(PermissionError()) == 3
    assert code_of(TypeError("ours")) is None


def test_verify_finds_nothing_in_what_is_whole(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = run(capsys, "verify", saved)
    assert (code, result["ok"], result["findings"]) == (0, True, [])
    assert result["bytes"] > 50_000
    for file in [*saved.glob("MANIFEST-*"), *saved.glob("rank-*/segment-*"), *saved.glob("rank-*/catalogue.mdb")]:
        assert run(capsys, "verify", file)[:1] == (0,), file


def test_verify_finds_a_flipped_bit_in_every_kind_of_file(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in [next(copy.glob("MANIFEST-*1")), next(copy.glob("rank-*/segment-*1-0000"))]:
        whole = file.read_bytes()
        for at in (9, 70, len(whole) // 2, len(whole) - 1):
            content = bytearray(whole)
            content[at] ^= 4
            file.write_bytes(content)
            assert run(capsys, "verify", copy)[0] == 1, (file, at)
            assert run(capsys, "verify", file)[0] == 1, (file, at)
        file.write_bytes(whole)
    assert run(capsys, "verify", copy)[0] == 0


def test_verify_of_a_table_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "table"
    with EmbTable("t", 4, directory=path) as table:
        table.insert(np.arange(1000))
        code, result = run(capsys, "verify", path)
        assert (code, result["error"]["type"]) == (3, "LockedError")
    assert run(capsys, "verify", path)[:1] == (0,)
    content = bytearray((path / "metadata").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "metadata").write_bytes(content)
    code, result = run(capsys, "verify", path)
    assert code == 1 and "does not match its digest" in result["findings"][0]["what"]
    (path / "header").unlink()
    assert run(capsys, "verify", path)[0] == 1
    assert not (path / "header").exists()


def test_a_table_directory_that_cannot_be_locked_is_no_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a medium that nobody may write to."""
    EmbTable("t", 4, directory=tmp_path / "t").close()

    def refuse(path: str, owner: str) -> None:
        raise StorageError(errno.EROFS, "opening it: Read-only file system", path)

    monkeypatch.setattr(findings, "Directory", refuse)
    assert main(["verify", str(tmp_path / "t")]) == 3 and "Read-only" in capsys.readouterr().err


def test_verify_of_what_nobody_would_verify_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EmbTable("t", 4, directory=tmp_path / "table") as table:
        table.insert(np.arange(10))
    os.mkfifo(tmp_path / "pipe")
    for path, remedy in ((tmp_path / "table" / "header", "give the directory"), (tmp_path / "pipe", "give the path")):
        code, result = run(capsys, "verify", path)
        assert (code, result["error"]["type"]) == (2, "ConfigError") and remedy in result["error"]["message"]
    with pytest.raises(ConfigError):
        examine(str(tmp_path / "pipe"))


def test_inspect_reads_no_state_to_say_how_long_it_is(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Reader(saved, 1) as reader:
        assert reader.state_bytes("dense") == len(reader.state("dense")) == 5000
    monkeypatch.setattr(Reader, "state_pieces", None)
    monkeypatch.setattr(Reader, "state", None)
    code, result = run(capsys, "inspect", f"{saved}@1", "--quick")
    assert (code, result["states"]) == (0, {"dense": 5000})


@pytest.mark.parametrize("as_json", [False, True])
def test_a_mistake_of_ours_is_no_finding(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    def planted(path: str) -> None:
        raise TypeError("planted")

    monkeypatch.setattr("embcache.commands.listing.generations", planted)
    assert main(["list", str(saved), *(["--json"] if as_json else [])]) == 3
    said = capsys.readouterr()
    assert "Traceback" in said.err and "in planted" in said.err and "please report" in said.err
    if as_json:
        assert json.loads(said.out) == {"error": {"type": "TypeError", "message": "planted", "exit_code": 3}}


@pytest.mark.parametrize("seed", range(40))
def test_verify_never_crashes_on_any_file(saved: Path, tmp_path: Path, seed: int) -> None:
    """Whatever is done to the files, it ends in findings."""
    draw = random.Random(seed)
    path = Path(shutil.copytree(saved, tmp_path / "copy"))
    with EmbTable("t", 4, directory=tmp_path / "table") as table:
        table.insert(np.arange(1000))
    files = [file for file in (*path.rglob("*"), *(tmp_path / "table").iterdir()) if file.is_file()]
    for _ in range(draw.randint(1, 4)):
        file = draw.choice(files)
        if not file.is_file():
            continue
        content = bytearray(file.read_bytes())
        match draw.randrange(7):
            case 0:
                content = content[: draw.randint(0, len(content))]
            case 1:
                content += draw.randbytes(draw.randint(1, 9000))
            case 2 if content:
                at = draw.randrange(len(content))
                content[at : at + 8] = draw.randbytes(8)
            case 3 if content:
                at = draw.randrange(len(content)) // 4096 * 4096
                content[at : at + 4096] = bytes(min(4096, len(content) - at))
            case 4:
                content = bytearray(files[0].read_bytes()) if files[0].is_file() else content
            case 5:
                file.unlink()
                if draw.random() < 0.5:
                    file.mkdir()
                continue
            case _:
                content = bytearray(draw.randbytes(draw.randint(0, 6000)))
        if file.is_file():
            file.write_bytes(content)
    for target in (path, tmp_path / "table", *path.rglob("*")):
        assert all(isinstance(one, Finding) for one in examine(str(target)))


def test_the_progress_bar_shows_on_a_terminal_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        with Output(False, io.StringIO(), stream).progress(100 << 20, "reading") as bar:
            bar.add(50 << 20)
            bar.at(100 << 20, 100 << 20)
        assert ("reading" in stream.getvalue() and "/s" in stream.getvalue()) == shown


def test_the_progress_bar_shows_on_a_terminal_that_says_it_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, terminal = os.openpty()
    try:
        with open(terminal, "w", closefd=False) as stream:
            monkeypatch.setattr("sys.stderr", stream)
            with Output(False, io.StringIO()).progress(100 << 20, "reading") as bar:
                bar.add(100 << 20)
            monkeypatch.undo()
            stream.write("end")
        assert b"reading: " in os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(terminal)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_closed_pipe_changes_no_exit_code(copy: Path, as_json: bool, unbuffered: bool) -> None:
    """Whether the words are noticed to go nowhere when they are written, or when they are flushed."""
    (copy / "MANIFEST-0000000000000001").write_bytes(b"EMBCKPT\n" + bytes(100))
    environment = os.environ | {"PYTHONPATH": str(Path(embcache.__file__).parents[1])}
    code = "import sys; from embcache.cli import main; sys.exit(main(sys.argv[1:]))"
    if unbuffered:
        code = f"import io, sys; sys.stdout = io.TextIOWrapper(open(1, 'wb', 0), write_through=True); {code}"
    for path, expected in ((copy, 1), (copy / "absent", 2)):
        read, write = os.pipe()
        os.close(read)
        try:
            command = [sys.executable, "-c", code, "list", path, *(["--json"] if as_json else [])]
            ran = subprocess.run(command, env=environment, stdout=write, stderr=subprocess.PIPE, check=False)
        finally:
            os.close(write)
        assert ran.returncode == expected and b"Traceback" not in ran.stderr and b"BrokenPipe" not in ran.stderr


def test_the_command_of_a_checkout_works_without_torch_and_survives_a_closed_pipe(saved: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(Path(embcache.__file__).parents[1])}
    command = [ROOT / "tools" / "dump", "list", saved]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "") and "delta on 1" in ran.stdout
    python = saved.parent / "python"  # as in an environment that is being made
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S \"$@\"\n")
    python.chmod(0o755)
    bare = subprocess.run(
        command, env=environment | {"PYTHON": str(python)}, capture_output=True, text=True, check=False
    )
    assert bare.returncode == 3 and "has no embcache yet" in bare.stderr
    code = "import sys; sys.modules['torch'] = None; from embcache.cli import main; sys.exit(main(sys.argv[1:]))"
    read, write = os.pipe()
    os.close(read)
    try:
        ran = subprocess.run(
            [sys.executable, "-c", code, "list", saved],
            env=environment,
            stdout=write,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write)
    assert (ran.returncode, ran.stderr) == (0, b"")

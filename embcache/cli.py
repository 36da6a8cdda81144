"""The `embcache` command: looks at checkpoints and table directories, and moves tables between them and other formats.

Owns the parser, the choice of the command, and what an error means to a shell; the commands are in `commands/`. No torch.

Exit codes: 0 fine; 1 findings: something is damaged, or two things differ; 2 usage: a path, a name or an option is wrong;
3 environment: a full disk, a lock, a missing package; or a mistake of embcache itself, with its traceback.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from .commands import COMMANDS
from .commands.output import ENVIRONMENT, FINE, Output, code_of
from .commands.targets import PLACED

__all__ = ["main", "parser"]

_INTERRUPTED = 130  # as a shell has it: 128 + SIGINT

_ABOUT = """\
Look at embcache's checkpoints and table directories, and move tables between them and other formats.

A checkpoint is a directory of generations, each the whole content of its tables at one moment. A table directory is what
EmbTable(directory=...) works in. Neither needs torch, or the model, to be looked at."""

_ENDING = """\
exit codes: 0 fine; 1 findings (damage, differences); 2 usage (a wrong path, name or option); 3 environment (a full disk,
a lock, a missing package), or a mistake of embcache itself. Nothing is changed but what a command is told to write."""


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        "embcache", description=_ABOUT, epilog=_ENDING, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--version", action="version", version=f"embcache {sys.modules[__package__].__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add(commands)
    for one in {id(one): one for one in commands.choices.values()}.values():
        one.add_argument("--json", action="store_true", help="print the result as one JSON object")
        one.formatter_class = argparse.RawDescriptionHelpFormatter
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the process's own.

    Returns
    -------
    int
        The exit code.
    """
    try:
        given = parser().parse_args(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FINE
    output = Output(given.json)
    PLACED.clear()
    try:
        code: int = given.run(given, output)
        output.flush()
        return code
    except KeyboardInterrupt:
        new = f"{', '.join(PLACED)} is new, and whole; nothing else" if PLACED else "nothing"
        output.error(f"interrupted; {new} that existed before has changed")
        return _INTERRUPTED
    except Exception as error:
        failed = code_of(error)
        if failed is None:  # our own mistake: its traceback is what a report needs
            output.error("a mistake of embcache; please report what follows\n" + traceback.format_exc().rstrip())
            failed = ENVIRONMENT
        output.failure(error, failed)
        output.flush()
        return failed


if __name__ == "__main__":
    sys.exit(main())

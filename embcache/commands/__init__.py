"""The commands of `embcache`, a file for each noun.

A command is a module with ``add(commands)``, which describes it to the parser, and a function that runs it: it takes the
parsed arguments and an `Output`, and returns an exit code. It raises the errors of `embcache.errors`; what these mean to a
shell is decided in one place (`output.code_of`). Memory is bounded by pieces, whatever a table's size.
"""

from __future__ import annotations

from . import contents, copies, differences, directories, exporting, findings, importing, listing, traces

__all__ = ["COMMANDS"]

COMMANDS = (listing, findings, contents, differences, directories, exporting, importing, copies, traces)

"""One call at a time in a thread, while the caller does something else."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..errors import StorageError

__all__ = ["Helper"]

_LOOK_S = 1.0  # who waits looks so often whether the thread is alive


class Helper:
    """A thread that does what `start` gives it; `result` waits, and returns or raises what came of it.

    Where the system has no thread left, `start` does the work itself. `close`, or leaving the block, waits for the call in progress,
    so that nothing it uses is closed under it. Thread safety: `start` and `result` take turns, in one thread.

    Attributes
    ----------
    busy : bool
        Whether `result` was not called since `start`.
    wanted : bool
        Whether somebody waits in `result`: a call that also does what is not asked for may end.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy = self.wanted = False

    def start(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Begin ``call(*arguments)``."""
        self.busy = True
        self._calls.put((call, arguments))
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="embcache helper", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self._calls.put(None)
                self._work()
            else:
                self._thread = thread

    def result(self) -> Any:
        """What the last call returned; raises what it raised. `StorageError` where the thread has died over it, or is not this process's."""
        self.wanted = True
        value, error = self._answer()
        self.busy = self.wanted = False
        if error is not None:
            raise error
        return value

    def _answer(self) -> tuple[Any, BaseException | None]:
        alive = True
        while alive:
            alive = self._thread is not None and self._thread.is_alive()
            try:
                return self._answers.get(
                    alive, _LOOK_S
                )  # a last time when it is not: it may have answered before it went
            except queue.Empty:
                pass
        self.busy = self.wanted = False
        raise StorageError(
            errno.EIO,
            "the thread that read or wrote a part of a checkpoint has died, or is another process's: try again",
        )

    def close(self) -> None:
        """Wait for the call in progress, and end the thread. Again does nothing."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, arguments = item
            try:
                self._answers.put((call(*arguments), None))
            except BaseException as error:
                self._answers.put((None, error))

    def __enter__(self) -> Helper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

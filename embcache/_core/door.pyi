from collections import deque
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, final

from embcache._core.doors import Turn
from embcache._core.plan import Plan
from embcache._core.swap import SwapManager

@final
class Door:
    lock: Any
    rows: Any
    turn: Turn
    late: deque[Plan]
    planner: SwapManager
    saving: Any
    transit: Any
    closed: bool
    changes: int
    def __init__(self, planner: SwapManager) -> None: ...
    @property
    def planning(self) -> AbstractContextManager[None]: ...
    @property
    def moving(self) -> AbstractContextManager[None]: ...
    @property
    def training(self) -> AbstractContextManager[None]: ...
    @property
    def held(self) -> bool: ...
    def check_process(self) -> None: ...
    def settle(self) -> None: ...
    def wait_for_save(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

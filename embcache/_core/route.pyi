from typing import final

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int64]

def owners_of(keys: _Ints, world: int) -> _Ints: ...

@final
class Router:
    world: int
    def __init__(self, group_of: _Ints, world: int) -> None: ...
    def route(self, keys: _Ints, table_offsets: _Ints) -> tuple[_Ints, _Ints, _Ints, _Ints, _Ints, _Ints]: ...

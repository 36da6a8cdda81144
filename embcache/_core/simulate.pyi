import numpy as np
from numpy.typing import NDArray

def simulate(keys: NDArray[np.int64], capacity: int, policy: str = "lru", lookahead: int | None = None) -> int: ...

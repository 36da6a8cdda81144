import numpy as np
import numpy.typing as npt

def lengths_fit(lengths: npt.NDArray[np.int64], total: int) -> bool: ...
def batch_offsets(
    lengths: npt.NDArray[np.int64], first_bags: npt.NDArray[np.int64], total: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None: ...

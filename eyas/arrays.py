"""Names of the types of NumPy arrays, and the array that names no rows."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Reals = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NO_ROWS: Ints = np.zeros(0, np.int64)

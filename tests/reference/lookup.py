"""Reference of the lookup, which adds one id after the other in float32."""

import numpy as np


def lookup_rows(table, ids, row_splits, gains) -> np.ndarray:
    """Returns the scaled sum of the rows of each sample, `[samples, dim]`."""
    out = np.zeros([len(row_splits) - 1, table.shape[1]], np.float32)
    for sample in range(len(out)):
        for i in range(row_splits[sample], row_splits[sample + 1]):
            out[sample] += gains[i] * table[ids[i]]
    return out


def sample_of(row_splits) -> np.ndarray:
    """Returns the sample index of each id."""
    return np.repeat(np.arange(len(row_splits) - 1), np.diff(row_splits))

"""List-based reference of a step with tables sharded over processes.

A batch is a list of features. Each feature is a list of samples, and each
sample is a list of (id, weight), as in `servers`.
"""

import collections

import numpy as np

from tests.reference import servers


def part(feature, samples, first_row: int, num_rows: int):
    """Selects the ids in rows `[first_row, first_row + num_rows)`.

    Returns:
      The outputs that use these rows, and for each output its local rows and
      gains.
    """
    by_output = collections.defaultdict(list)
    for row, gain, place in servers.terms(feature, samples):
        if 0 <= row - first_row < num_rows:
            by_output[place].append((row - first_row, gain))
    return list(by_output), list(by_output.values())


def inputs(parts) -> list[tuple]:
    """Returns the ids, splits and gains of each part."""
    found = []
    for _, bags in parts:
        flat = [one for bag in bags for one in bag]
        found.append(
            (
                np.array([row for row, _ in flat], np.int64),
                np.cumsum([0, *map(len, bags)]).astype(np.int64),
                np.array([gain for _, gain in flat], np.float32),
            )
        )
    return found


def gradients(parts, by_feature) -> np.ndarray:
    """Concatenates the gradients of the outputs of all parts."""
    return np.concatenate(
        [
            np.zeros(0, np.float32),
            *(
                gradient[outputs].ravel()
                for (outputs, _), gradient in zip(
                    parts, by_feature, strict=True
                )
                if outputs
            ),
        ]
    )


def key_uses(keys, is_own) -> dict[int, int]:
    """Returns the uses of the keys of one owner, in the order of first use."""
    found = {}
    for key in keys:
        if is_own(key):
            found[key] = found.get(key, 0) + 1
    return found


def key_request(uses) -> np.ndarray:
    """Returns the words of a request.

    Args:
      uses: Result of `key_uses` for each feature with keys.
    """
    words = []
    for of_feature in uses:
        has_times = any(times != 1 for times in of_feature.values())
        words += [len(of_feature), int(has_times)]
        for key in of_feature:
            words += [key % 2**32, key % 2**64 >> 32]
        words += list(of_feature.values()) if has_times else []
    return np.array(words, np.uint32)

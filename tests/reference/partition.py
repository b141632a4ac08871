"""Reference that finds the shard of a row by iterating over all shards."""

import numpy as np


def even_offsets(num_rows: int, num_shards: int) -> np.ndarray:
    """Returns the cumulative shard sizes for the placements `div` and `mod`."""
    sizes = [
        len(part) for part in np.array_split(np.arange(num_rows), num_shards)
    ]
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def rows_of_shard(offsets, placement: str, shard: int) -> np.ndarray:
    """Returns the global rows of a shard, in the order of its local rows."""
    if placement == "mod":
        return np.arange(shard, offsets[-1], len(offsets) - 1)
    return np.arange(offsets[shard], offsets[shard + 1])


def owner(row: int, offsets, placement: str) -> tuple[int, int]:
    """Returns (shard, local row)."""
    for shard in range(len(offsets) - 1):
        found = np.flatnonzero(rows_of_shard(offsets, placement, shard) == row)
        if found.size:
            return shard, int(found[0])
    raise IndexError(row)


def split(table: np.ndarray, offsets, placement: str) -> list[np.ndarray]:
    """Returns the shards of a table."""
    return [
        table[rows_of_shard(offsets, placement, shard)]
        for shard in range(len(offsets) - 1)
    ]


def join(shards, offsets, placement: str) -> np.ndarray:
    """Returns the full table of shards that `split` returned."""
    table = np.zeros([offsets[-1], *shards[0].shape[1:]], shards[0].dtype)
    for shard, value in enumerate(shards):
        table[rows_of_shard(offsets, placement, shard)] = value
    return table


def assign_partition(ids, offsets, placement: str):
    """Returns (shards, local_rows), both shaped like `ids`."""
    owners = [owner(row, offsets, placement) for row in ids.flat]
    shards = np.array([one[0] for one in owners], np.int32)
    local_rows = np.array([one[1] for one in owners], ids.dtype)
    return shards.reshape(ids.shape), local_rows.reshape(ids.shape)

"""Reference that routes ids to a list per shard."""

import numpy as np

from tests.reference import partition


def route_ids(ids, offsets, placement: str, *, unique: bool):
    """Returns (local_rows, splits, permutation, inverse)."""
    places = list(range(len(ids)))
    if unique:
        places = [i for i in places if ids[i] not in ids[:i]]
        places.sort(key=lambda i: ids[i])
    owners = {i: partition.owner(ids[i], offsets, placement) for i in places}
    # `sorted` is stable, so ids of the same shard stay in order.
    permutation = sorted(places, key=lambda i: owners[i][0])
    shards = [owners[i][0] for i in permutation]
    splits = [0] + [shards.count(s) for s in range(len(offsets) - 1)]
    slots = {
        ids[i] if unique else i: slot for slot, i in enumerate(permutation)
    }
    inverse = [
        slots[id_ if unique else position] for position, id_ in enumerate(ids)
    ]
    return (
        np.array([owners[i][1] for i in permutation], ids.dtype),
        np.cumsum(splits).astype(np.int64),
        np.array(permutation, np.int32),
        np.array(inverse, np.int32),
    )

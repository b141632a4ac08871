"""A simple program for TensorFlow's host ops of SparseCores.

The functions compute the same float32 numbers as the ops, in the same order,
with loops over the ids.
"""

import dataclasses

import numpy as np

PADDING = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of a stack of tables in one replica.

    Attributes:
      samples: Ids of each sample.
      weights: Weight of each id, over all samples. Or one weight for all ids.
      combiner: "sum", "mean" or "sqrtn".
      col_offset: First row of the table in its stack.
      rotation: Rotation of the table.
    """

    samples: list[list[int]]
    weights: list[float] | float = 1.0
    combiner: str = "sum"
    col_offset: int = 0
    rotation: int = 0


def convert(feature, *, num_cores, cores_per_chip, row_offset, stacked):
    """Returns (row, col, gain) triples for each SparseCore of the chip."""
    one = np.float32(1)
    cores = [[] for _ in range(cores_per_chip)]
    per_core = len(feature.samples) // cores_per_chip
    position = 0
    for sample, ids in enumerate(feature.samples):
        if isinstance(feature.weights, float):
            weights = [np.float32(feature.weights)] * len(ids)
        else:
            weights = feature.weights[position : position + len(ids)]
            weights = [np.float32(weight) for weight in weights]
        position += len(ids)
        total = np.float32(0)
        for weight in weights:
            total += weight if feature.combiner == "mean" else weight * weight
        merged = []
        for row, weight in zip(ids, weights):
            if merged and merged[-1][0] == row:
                merged[-1][1] += weight
            else:
                merged.append([row, weight])
        core = sample // per_core
        for row, gain in merged:
            if feature.combiner == "mean":
                gain *= one / total if total else np.float32(0)
            elif feature.combiner == "sqrtn":
                gain *= one / np.sqrt(total) if total else np.float32(0)
            shard = (row + feature.rotation) % num_cores
            cores[core].append(
                (
                    sample % per_core
                    + row_offset // cores_per_chip
                    + stacked // cores_per_chip * core,
                    row // num_cores * num_cores + shard + feature.col_offset,
                    gain,
                )
            )
    return cores


def convert_all(features, num_cores, cores_per_chip):
    """Returns for each SparseCore a list of (triples, col offset)."""
    stacked = sum(len(feature.samples) for feature in features)
    cores = [[] for _ in range(cores_per_chip)]
    row_offset = 0
    for feature in features:
        converted = convert(
            feature,
            num_cores=num_cores,
            cores_per_chip=cores_per_chip,
            row_offset=row_offset,
            stacked=stacked,
        )
        row_offset += len(feature.samples)
        for core, triples in enumerate(converted):
            cores[core].append((triples, feature.col_offset))
    return cores


def sort(lists, num_cores, samples_per_core):
    """Returns the sorted triples of each shard, and the two counts of each."""
    shards = [[] for _ in range(num_cores)]
    unique = [0] * num_cores
    for offset in sorted({offset for _, offset in lists}):
        triples = [
            triple
            for found, other in lists
            if other == offset
            for triple in found
        ]
        last = None
        # The sort is stable.
        for row, col, gain in sorted(triples, key=lambda triple: triple[1]):
            shard = shards[col % num_cores]
            if last == (row, col):
                shard[-1][2] += gain
                continue
            unique[col % num_cores] += last is None or last[1] != col
            last = (row, col)
            shard.append([row, col, gain])
    in_shards = [
        [
            (row % samples_per_core, col // num_cores, gain)
            for row, col, gain in shard
        ]
        for shard in shards
    ]
    return in_shards, [len(shard) for shard in shards], unique


def buffers(cores, capacity, drop):
    """Returns row pointers and padded triples, or None if ids do not fit."""
    pointers, triples = [], []
    for shards in cores:
        for shard in shards:
            if len(triples) + len(shard) > capacity:
                if not drop:
                    return None
                shard = shard[: capacity - len(triples)]
            triples += shard
            pointers.append(len(triples))
            while len(triples) % 8:
                triples.append((PADDING, PADDING, np.float32(PADDING)))
        while len(pointers) % 8:
            pointers.append(len(triples))
    return pointers, triples

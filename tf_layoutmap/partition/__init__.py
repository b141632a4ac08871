"""Who owns a row: pure arithmetic, no TensorFlow."""

from tf_layoutmap.partition.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)
from tf_layoutmap.partition.row_partition import PLACEMENTS, RowPartition

__all__ = [
    "PLACEMENTS",
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
    "RowPartition",
]


def __dir__() -> list[str]:
    return __all__

"""Who owns a row: pure arithmetic, no TensorFlow."""

from tf_layoutmap.partition.partitioners import FixedShardsPartitioner
from tf_layoutmap.partition.partitioners import MaxSizePartitioner
from tf_layoutmap.partition.partitioners import MinSizePartitioner
from tf_layoutmap.partition.partitioners import Partitioner
from tf_layoutmap.partition.row_partition import PLACEMENTS
from tf_layoutmap.partition.row_partition import RowPartition

__all__ = [
    "PLACEMENTS",
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
    "RowPartition",
]

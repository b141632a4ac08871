# TensorFlow's wheel contains no types of this module, which protobuf generates.

from collections.abc import Iterable, Sequence
from typing import Self

class SparseCoreTableLayout:
    table_name: str
    num_sparse_cores: int
    num_partitions: int
    total_rows_per_sparse_core_shard: int
    unsharded_shape: Sequence[int]
    unsharded_padded_shape: Sequence[int]
    stacked_table_name: str
    sparse_core_shard_row_offset: int
    sparse_core_shard_rotation: int

    def __init__(
        self,
        *,
        table_name: str = ...,
        num_sparse_cores: int = ...,
        num_partitions: int = ...,
        total_rows_per_sparse_core_shard: int = ...,
        unsharded_shape: Iterable[int] = ...,
        unsharded_padded_shape: Iterable[int] = ...,
        stacked_table_name: str = ...,
        sparse_core_shard_row_offset: int = ...,
        sparse_core_shard_rotation: int = ...,
    ) -> None: ...

class SparseCoreTableLayouts:
    tables: Sequence[SparseCoreTableLayout]

    def __init__(
        self, *, tables: Iterable[SparseCoreTableLayout] = ...
    ) -> None: ...
    def SerializeToString(self) -> bytes: ...  # noqa: N802
    @classmethod
    def FromString(cls, s: bytes) -> Self: ...  # noqa: N802

"""Reads the arguments `table_dtypes` and `rounding_seed` of `TPUEmbedding`.

This module does not import TensorFlow. The module only reads the names of
dtypes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tf_layoutmap.embedding.configs import config

TABLE_DTYPES = ("float32", "bfloat16", "float16")


def with_dtypes(
    spec: config.EmbeddingSpec,
    table_configs: Sequence[Any],
    table_dtypes: Any,
) -> config.EmbeddingSpec:
    """Returns the spec with the dtypes of the argument `table_dtypes`.

    Args:
      spec: Spec in which all tables are float32.
      table_configs: The `TableConfig` of each table in `spec`.
      table_dtypes: None, one dtype for all tables, or a mapping from tables to
        dtypes. Tables are table names or `TableConfig` objects. Tables that are
        not in the mapping are float32. A dtype is one of `TABLE_DTYPES`, as a
        string or a `tf.DType`.

    Raises:
      ValueError: If a dtype is not one of `TABLE_DTYPES`, or if a table does
        not exist. The message names the table.
    """
    if table_dtypes is None:
        return spec
    if not isinstance(table_dtypes, Mapping):
        name = _read_dtype(table_dtypes, "")
        dtypes = [name] * len(spec.tables)
    else:
        dtypes = ["float32"] * len(spec.tables)
        by_table = cast("Mapping[Any, Any]", table_dtypes)
        for key, dtype in by_table.items():
            index = config.index_of_table(
                key, spec, table_configs, "table_dtypes"
            )
            dtypes[index] = _read_dtype(
                dtype, f" (table {spec.tables[index].name!r})"
            )
    return dataclasses.replace(
        spec,
        tables=tuple(
            dataclasses.replace(table, dtype=dtype)
            for table, dtype in zip(spec.tables, dtypes)
        ),
    )


def _read_dtype(dtype: Any, where: str) -> str:
    name = (
        {"half": "float16"}.get(dtype, dtype)
        if isinstance(dtype, str)
        else getattr(dtype, "name", None)
    )
    if name not in TABLE_DTYPES:
        raise ValueError(
            f"Argument `table_dtypes` must hold one of {TABLE_DTYPES}. "
            f"Received: {dtype!r}{where}."
        )
    return name


def read_seed(seed: Any) -> int:
    """Checks that the seed is an int64, and returns the seed.

    Raises:
      ValueError: If `seed` is not an int in the range of int64.
    """
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(
            "Argument `rounding_seed` must be an int in the range of int64. "
            f"Received: {seed!r}."
        )
    return seed

"""All rows, in the order in which replacements of one name are stacked."""

from tf_layoutmap._patches import (
    divided_rows,
    emulation_rows,
    keras3_rows,
    layer_rows,
    memory_rows,
    mesh_rows,
    ps_rows,
    tf_keras_rows,
)
from tf_layoutmap._patches.rows import Patch

# Of two rows for one name the later one is called first: what moves values to
# a mesh goes around what tables need.
ROWS: tuple[Patch, ...] = (
    *mesh_rows.ROWS,
    *layer_rows.ROWS,
    *keras3_rows.ROWS,
    *tf_keras_rows.ROWS,
    *emulation_rows.ROWS,
    *ps_rows.ROWS,
    *divided_rows.ROWS,
    *memory_rows.ROWS,
)

GROUPS: dict[str, tuple[Patch, ...]] = {
    group: tuple(row for row in ROWS if row.group == group)
    for group in dict.fromkeys(row.group for row in ROWS)
}

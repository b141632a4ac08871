"""Tests `tf_layoutmap.serving.stored_tables`: variables of exported tables."""

from hypothesis import given
from hypothesis import strategies as st

from tf_layoutmap.deltas.served import packing
from tf_layoutmap.embedding.table_to_export import TableToExport
from tf_layoutmap.serving.stored_tables import store_tables

# The storage type, the number of columns and the number of rows of each table.
TABLES = st.lists(
    st.tuples(
        st.sampled_from(["float32", "int8"]),
        st.integers(1, 4),
        st.integers(1, 5),
    )
)


def stored(tables, *, fuse):
    return store_tables(
        [
            TableToExport(
                owner=None,
                name_in_owner="words",
                name="words",
                weight=None,
                num_rows=num_rows,
                dim=dim,
                dtype="float32",
                alias=None,
            )
            for _, dim, num_rows in tables
        ],
        [kind for kind, _, _ in tables],
        [None] * len(tables),
        fuse=fuse,
    )


def formats(tables):
    return [packing.choose(kind, "float32", dim) for kind, dim, _ in tables]


def variables(stored_tables):
    return {table.variable for table in stored_tables}


@given(tables=TABLES, fuse=st.booleans())
def test_every_row_has_a_unique_position(tables, fuse):
    stored_tables = stored(tables, fuse=fuse)
    used = [
        (table.variable.name, table.start + row)
        for table, (_, _, num_rows) in zip(stored_tables, tables, strict=True)
        for row in range(num_rows)
    ]
    there = [
        (variable.name, row)
        for variable in variables(stored_tables)
        for row in range(variable.num_rows)
    ]
    assert sorted(used) == sorted(there)
    assert [table.variable.form for table in stored_tables] == formats(tables)


@given(tables=TABLES)
def test_tables_of_one_format_share_a_variable(tables):
    fused = variables(stored(tables, fuse=True))
    assert len(fused) == len(set(formats(tables)))
    assert len(variables(stored(tables, fuse=False))) == len(tables)

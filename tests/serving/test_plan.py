"""Tests `tf_layoutmap.serving.stored_tables`: variables of exported tables."""

from hypothesis import given
from hypothesis import strategies as st

from tf_layoutmap.deltas.served.packing import RowFormat
from tf_layoutmap.serving.stored_tables import make_plan

TABLES = st.lists(
    st.tuples(
        st.builds(
            RowFormat, st.sampled_from(["float32", "int8"]), st.integers(1, 3)
        ),
        st.integers(1, 5),
    )
)


@given(tables=TABLES, fuse=st.booleans())
def test_every_row_has_a_unique_position(tables, fuse):
    plan = make_plan(tables, fuse=fuse)
    used = [
        (place.variable, place.start + row)
        for place, (_, size) in zip(plan.places, tables, strict=True)
        for row in range(size)
    ]
    there = [
        (variable, row)
        for variable, size in enumerate(plan.num_rows)
        for row in range(size)
    ]
    assert sorted(used) == there
    for place, (form, _) in zip(plan.places, tables):
        assert plan.formats[place.variable] == form


@given(tables=TABLES)
def test_tables_of_one_format_share_a_variable(tables):
    fused = make_plan(tables, fuse=True)
    assert len(fused.formats) == len({form for form, _ in tables})
    assert len(make_plan(tables, fuse=False).formats) == len(tables)

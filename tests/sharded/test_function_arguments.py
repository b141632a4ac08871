"""A table on any devices can be an argument of a `tf.function`."""

import numpy as np
import pytest
import tensorflow as tf

from tests.sharded.tables import PLACEMENTS
from tf_layoutmap.sharded import ShardedVariable, ShardedVariableSpec

IDS = [7, 0, 7, 9]
CUTS = [*PLACEMENTS, "columns"]


def make(values, layout, devices):
    axis = int(layout == "columns")
    rule = PLACEMENTS["div" if axis else layout]
    num_shards = 2 if axis else 5
    return ShardedVariable.create(
        values,
        axis=axis,
        placement=rule(values.shape[axis], num_shards),
        devices=devices,
        name="emb",
    )


def use(table, ids):
    """Reads, updates and differentiates the table; returns all results."""
    with tf.GradientTape() as tape:
        rows = tf.gather(table, ids)
        loss = tf.reduce_sum(rows**2)
    gradient = tape.gradient(loss, table)
    table.scatter_sub(tf.IndexedSlices(0.5 * gradient.values, gradient.indices))
    table.scatter_update(tf.IndexedSlices(tf.ones([2, 2]), ids[:2]))
    table.scatter_nd_add([[9, 1]], [100.0])
    table[2:4].assign(tf.zeros([2, 2]))
    table.assign_add(tf.ones([10, 2]))
    return rows, table[-1], table[1:8:3, 1], table.value()


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", CUTS)
@pytest.mark.parametrize(
    "devices",
    [["CPU:0"], ["CPU:1"], ["CPU:0", "CPU:1"], ["CPU:1", "CPU:0", "CPU:2"]],
)
def test_a_function_matches_eager_execution(values, layout, devices):
    table, ref = make(values, layout, devices), make(values, layout, None)
    inner = tf.function(use)
    outer = tf.function(lambda table, ids: inner(table, ids))
    for function in (inner, outer):
        expected = use(ref, tf.constant(IDS))
        got = function(table, tf.constant(IDS))
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(table.numpy(), ref.numpy())


def test_lookups_run_on_the_devices_of_the_shards(values):
    table = make(values, "div", ["CPU:0", "CPU:1"])
    inside = []

    @tf.function
    def lookup(table, ids):
        inside.append(table.devices)
        return tf.gather(table, ids)

    np.testing.assert_array_equal(lookup(table, IDS), values[IDS])
    assert inside == [table.devices]
    ops = [
        op
        for op in lookup.get_concrete_function(
            table, IDS
        ).graph.get_operations()
        if op.type == "LayoutMap>GatherRows"
    ]
    assert sorted(op.device for op in ops) == sorted(set(table.devices))


def test_only_tables_on_the_same_devices_share_a_trace(values):
    traces = []

    @tf.function
    def lookup(table, ids):
        traces.append(table.devices)
        return tf.gather(table, ids)

    devices = (["CPU:0"], ["CPU:0", "CPU:1"], ["CPU:1", "CPU:0"])
    for factor in (1, 2):
        for one in devices:
            np.testing.assert_array_equal(
                lookup(make(values * factor, "div", one), tf.constant(IDS)),
                values[IDS] * factor,
            )
    assert len(traces) == len(devices)


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]])
def test_a_concrete_function_accepts_other_tables_of_the_same_type(
    values, devices
):
    lookup = tf.function(
        lambda table, ids: tf.gather(table, ids)
    ).get_concrete_function(
        make(values, "mod", devices), tf.TensorSpec([None], tf.int32)
    )
    table = make(values * 2, "mod", devices)
    np.testing.assert_array_equal(
        lookup(table, tf.constant(IDS)), values[IDS] * 2
    )


def test_a_type_spec_defaults_to_one_cpu_or_uses_its_devices(values):
    tables = [
        make(values, "div", devices) for devices in (None, ["CPU:0", "CPU:1"])
    ]
    specs = tf.type_spec_from_value(tables[1])._component_specs
    for table, options in zip(tables, ({}, {"devices": tables[1].devices})):
        spec = ShardedVariableSpec(
            *specs, name="emb", placement="div", **options
        )
        assert spec == tf.type_spec_from_value(table)
        assert spec.devices == options.get("devices")

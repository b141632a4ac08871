"""Copies and unpickled tables share no state with the original."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.sharded.tables import PLACEMENTS, placed


def rows_in_turn(rows):
    return rows % 2, rows // 2


def unpickled(table):
    return pickle.loads(pickle.dumps(table))


@pytest.mark.parametrize("placement", [*PLACEMENTS, "columns"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, unpickled])
def test_a_duplicate_has_equal_values_and_no_shared_state(
    values, placement, duplicate
):
    # The function is defined at module level, because pickle requires this.
    if placement == "callable":
        table = tlm.ShardedVariable.create(
            values, name="emb", num_shards=2, placement=rows_in_turn
        )
    else:
        table = placed(values, placement)
    other = duplicate(table)
    assert (other.name, other.placement, other.axis) == (
        table.name,
        table.placement,
        table.axis,
    )
    np.testing.assert_array_equal(tf.gather(other, [9, 0]), values[[9, 0]])
    other.scatter_update(tf.IndexedSlices(-values[:1], [9]))
    np.testing.assert_array_equal(table.numpy(), values)
    np.testing.assert_array_equal(other[9], -values[0])


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, unpickled])
def test_optimizers_distinguish_a_duplicate_from_its_original(
    values, duplicate
):
    table = placed(values, "div")
    other = duplicate(table)
    assert other._unique_id != table._unique_id
    owner = table if duplicate is copy.copy else other
    assert all(shard._sharded_container() is owner for shard in other)
    assert all(shard._sharded_container() is table for shard in table)


def test_a_duplicate_of_an_exported_table_can_be_exported(values, tmp_path):
    module = tf.Module()
    module.table = placed(values, "mod")
    module.first = tf.function(lambda: module.table[0], input_signature=[])
    tf.saved_model.save(module, tmp_path / "one")
    module.table = copy.deepcopy(module.table)
    module.table.assign(values * 2)
    module.first = tf.function(lambda: module.table[0], input_signature=[])
    tf.saved_model.save(module, tmp_path / "two")
    for directory, factor in (("one", 1), ("two", 2)):
        loaded = tf.saved_model.load(tmp_path / directory)
        np.testing.assert_array_equal(loaded.first(), values[0] * factor)


def test_attributes_of_a_subclass_are_copied(values):
    class Words(tlm.ShardedVariable):
        pass

    table = Words([tf.Variable(values)])
    table.language = ["fi"]
    other = copy.deepcopy(table)
    assert isinstance(other, Words) and other.language == ["fi"]
    assert other.language is not table.language


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, unpickled])
@pytest.mark.parametrize(
    "options", [{"placement": "mod"}, {"axis": 1}, {"placement": rows_in_turn}]
)
def test_a_duplicate_of_a_spec_is_equal(values, duplicate, options):
    spec = tlm.ShardedVariable.create(
        values, name="emb", num_shards=2, **options
    )._type_spec
    other = duplicate(spec)
    assert other == spec and hash(other) == hash(spec)
    assert (other.name, other.axis, other.placement) == (
        spec.name,
        spec.axis,
        spec.placement,
    )

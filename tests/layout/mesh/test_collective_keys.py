"""A mesh and a `MirroredStrategy` work in the same process."""

import pytest
import tensorflow as tf

from tests.layout.meshes import mesh_of
from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh import collective_keys, transfer

DEVICES = [
    f"/job:localhost/replica:0/task:0/device:CPU:{number}"
    for number in range(2)
]


def sum_on_mesh(mesh):
    value = tf.constant([1.0, 2.0, 3.0, 4.0])
    layout = tf.experimental.dtensor.Layout(["batch"], mesh)
    return float(
        transfer.to_host(tf.reduce_sum(transfer.to_mesh(value, layout)))
    )


def sum_of_replicas():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    total = strategy.run(
        lambda: tf.distribute.get_replica_context().all_reduce(
            "sum", tf.constant(2.0)
        )
    )
    return float(strategy.experimental_local_results(total)[0])


def test_a_strategy_after_a_mesh_uses_other_keys():
    mesh = mesh_of(batch=2, model=2)
    for _ in range(2):
        assert sum_on_mesh(mesh) == 10
        assert sum_of_replicas() == 4


def test_groups_of_several_processes_keep_their_keys():
    mesh_of(batch=2, model=2)
    keys = tf_private.CollectiveKeys()
    assert keys.get_group_key(DEVICES) == collective_keys.OFFSET + 1
    other = tf_private.CollectiveKeys()
    of_worker = [one.replace("localhost", "worker") for one in DEVICES]
    assert other.get_group_key(of_worker) == 1
    assert other.get_instance_key(1, of_worker[0]) == 100


def test_strategies_from_before_the_first_mesh_raise():
    mesh_of(batch=2, model=2)
    keys = tf_private.CollectiveKeys()
    # This is the state of a strategy that was created before the patches.
    keys._instance_key_table = {1: dict.fromkeys(DEVICES, 100)}
    collective_keys.check_no_strategy_was_used()
    with pytest.raises(RuntimeError, match="Create the mesh before the strate"):
        keys.get_instance_key(1, DEVICES[0])
    keys._instance_key_table[1][DEVICES[0]] += 1
    with pytest.raises(RuntimeError, match="Create the mesh first, or use"):
        collective_keys.check_no_strategy_was_used()
    keys._instance_key_table.clear()

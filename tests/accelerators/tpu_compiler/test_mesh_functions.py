"""The functions that DTensor compiles for one device have the expected form."""

import pytest
import tensorflow as tf

from tests.accelerators import kernel_lists
from tests.accelerators.tpu_compiler import (
    collectives,
    lowering,
    mesh_functions,
)
from tests.layout.meshes import layout_of, mesh_of

dtensor = tf.experimental.dtensor


@pytest.fixture(scope="module")
def library():
    """Returns the function of one device that sums over a sharded dimension."""
    mesh = mesh_of(batch=2, model=2)

    @tf.function
    def sum_of_rows(x):
        return tf.reduce_sum(x, axis=1)

    x = dtensor.relayout(
        dtensor.copy_to_mesh(
            tf.ones([4, 6]), layout=layout_of(mesh, None, None)
        ),
        layout_of(mesh, "batch", "model"),
    )
    before = kernel_lists.function_names()
    sum_of_rows(x)
    found = dict(mesh_functions.functions_on_mesh(before))
    assert found.keys() == {"sum_of_rows"}
    return mesh_functions.library_of(found["sum_of_rows"])


def test_the_devices_of_a_mesh_row_sum_their_values(library):
    function = library.function[0]
    groups = collectives.groups_of(function, 4)
    assert list(groups.values()) == [[[0, 1], [2, 3]]]
    assert collectives.device_argument(function) is not None


def test_xla_lowers_the_function_of_a_device(library):
    program, facts = lowering.lower(library, 4)
    assert b"all_reduce" in program
    assert facts["collectives"] == 1
    # Each device has a shard of the input.
    assert facts["input_bytes"] == 4 * 2 * 3

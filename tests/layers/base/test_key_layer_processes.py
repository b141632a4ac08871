"""Trains a ShardedEmbedding with an open vocabulary in two processes."""

import numpy as np
import pytest
import tensorflow as tf

from tests import processes
from tests.layers.base import key_layer_program as program

# Starting the processes takes most of the time of a test.
DEADLINE_SECONDS = 180


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_two_processes_have_the_rows_of_one_replica(library, tmp_path):
    """The table holds all keys, so only the order of its rows differs."""
    outputs = [tmp_path / str(index) for index in range(2)]
    processes.run_workers(
        program,
        [[str(output), library] for output in outputs],
        tmp_path,
        DEADLINE_SECONDS,
    )
    expected = program.train(
        library,
        tf.distribute.get_strategy(),
        [
            [
                tf.concat(parts, 0)
                for parts in zip(
                    *(program.batch(number, one) for one in (0, 1))
                )
            ]
            for number in range(program.NUM_STEPS)
        ],
    )
    looked_up = np.split(expected.pop("looked_up"), 2)
    assert len(expected["keys"]) > 20
    for worker, output in enumerate(outputs):
        found = np.load(f"{output}.npz")
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        np.testing.assert_array_equal(found["looked_up"], looked_up[worker])

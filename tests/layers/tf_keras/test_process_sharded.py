"""Tests `fit` of tf_keras with layer tables sharded over processes."""

import functools
import json

import numpy as np
import pytest
import tensorflow as tf

from tests import processes, strategies

pytest.importorskip(
    "tf_keras", reason="needs tf_keras: pip install --no-deps tf_keras"
)

from tests.layers.tf_keras import process_sharded_program

DEADLINE_SECONDS = 180

# These calls require all rows of a table as variables of this process. If the
# tables are sharded, each call raises an error that contains the text below.
ERRORS = {
    "h5": "A table sharded over processes is not supported in legacy .h5 files",
    "set_weights": "tables are not Keras weights",
    "saved_model": "is sharded over processes, and is not converted",
}


@functools.cache
def fit_with_two_replicas():
    """Returns the trained model, its losses and its tables."""
    model, losses = process_sharded_program.fit(strategies.mirrored(2))
    embedding = process_sharded_program.plan.embedding_of(model)
    tables = [one.numpy() for one in embedding.embedding_tables.values()]
    return model, losses, tables


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("how", ["sharded", "replicated"])
def test_fit_in_two_processes_equals_fit_with_two_replicas(how, tmp_path):
    processes.run_in_folder(
        tmp_path, process_sharded_program, how, seconds=DEADLINE_SECONDS
    )
    model, losses, expected = fit_with_two_replicas()
    if how == "sharded":
        check_errors(tmp_path)
        check_files(tmp_path, model, expected)
    for worker in range(2):
        np.testing.assert_allclose(
            json.loads((tmp_path / f"losses_{worker}.json").read_text()),
            losses,
            1e-6,
        )
    embedding = process_sharded_program.plan.embedding_of(model)
    assert not np.array_equal(expected[0], np.zeros_like(expected[0]))
    for one in embedding.embedding_tables.values():
        one.assign(tf.zeros_like(one))
    tf.train.Checkpoint(model=model).read(
        str(tmp_path / "model")
    ).expect_partial()
    for one, rows in zip(embedding.embedding_tables.values(), expected):
        np.testing.assert_array_equal(one.numpy(), rows)


def check_files(folder, model, expected):
    """Checks files that all processes write together."""
    inputs = next(iter(process_sharded_program.data()))[0]
    outputs = model(inputs)
    served = tf.saved_model.load(str(folder / "exported"))
    np.testing.assert_allclose(
        served.serve(inputs), outputs, rtol=1e-5, atol=1e-6
    )
    other = process_sharded_program.plan.compiled(strategies.mirrored(1))
    other(inputs)
    for worker in range(2):
        other.load_weights(folder / f"own_{worker}" / "model.weights.h5")
        embedding = process_sharded_program.plan.embedding_of(other)
        tables = embedding.embedding_tables.values()
        for one, rows in zip(tables, expected, strict=True):
            np.testing.assert_array_equal(one.numpy(), rows)
        # The process has restored its own tables in both ways.
        for how in ("set", "loaded"):
            loaded = np.load(folder / f"{how}_{worker}.npz")
            for number, rows in enumerate(expected):
                np.testing.assert_array_equal(loaded[f"arr_{number}"], rows)


def check_errors(folder):
    """Checks the error of each call that requires all rows."""
    for worker in range(2):
        found = json.loads((folder / f"refused_{worker}.json").read_text())
        assert found.keys() == ERRORS.keys()
        for name, words in ERRORS.items():
            assert words in found[name], f"{name}: {found[name]}"

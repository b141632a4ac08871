"""Tests `fit` of tf_keras with layer tables sharded over processes."""

import functools
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests import processes, strategies

pytest.importorskip(
    "tf_keras", reason="needs tf_keras: pip install --no-deps tf_keras==2.21.*"
)

from tests.layers.tf_keras import divided_program

DEADLINE_SECONDS = 180

# These calls require all rows of a table. If no process has all rows, each call
# raises an error that contains the text below.
ERRORS = {
    "h5": "A table sharded over processes is not supported in legacy .h5 files",
    "weights.h5": "is sharded over processes, and no process has",
    "set_weights": "tables are not Keras weights",
    "export": "must have all rows of its tables in this process",
    "export of the model": "must have all rows of its tables in this process",
    "saved_model": "is sharded over processes, and no process has",
}


@functools.cache
def fit_with_two_replicas():
    """Returns the trained model, its losses and its tables."""
    model, losses = divided_program.fit(strategies.mirrored(2))
    embedding = divided_program.plan.embedding_of(model)
    tables = [one.numpy() for one in embedding.embedding_tables.values()]
    return model, losses, tables


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sharded", "copied"])
def test_fit_in_two_processes_equals_fit_with_two_replicas(how, tmp_path):
    processes.run_workers(
        pathlib.Path(divided_program.__file__),
        [[str(tmp_path), how]] * 2,
        tmp_path,
        DEADLINE_SECONDS,
    )
    if how == "sharded":
        check_errors(tmp_path)
    model, losses, expected = fit_with_two_replicas()
    for worker in range(2):
        np.testing.assert_allclose(
            json.loads((tmp_path / f"losses_{worker}.json").read_text()),
            losses,
            1e-6,
        )
    embedding = divided_program.plan.embedding_of(model)
    assert not np.array_equal(expected[0], np.zeros_like(expected[0]))
    for one in embedding.embedding_tables.values():
        one.assign(tf.zeros_like(one))
    tf.train.Checkpoint(model=model).read(
        str(tmp_path / "model")
    ).expect_partial()
    for one, rows in zip(embedding.embedding_tables.values(), expected):
        np.testing.assert_array_equal(one.numpy(), rows)


def check_errors(folder):
    """Checks the error of each call that requires all rows."""
    for worker in range(2):
        found = json.loads((folder / f"refused_{worker}.json").read_text())
        assert found.keys() == ERRORS.keys()
        for name, words in ERRORS.items():
            assert words in found[name], f"{name}: {found[name]}"

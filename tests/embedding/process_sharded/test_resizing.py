"""Errors of `resize` of sharded vocabularies, and files written after it."""

import json

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import processes
from tests.deltas import cases
from tests.embedding.host import open_tables_program as plan
from tests.embedding.process_sharded import keys_program
from tests.embedding.process_sharded import resizing_program as program

# Starting the processes takes most of the time of the tests.
DEADLINE_SECONDS = 180


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs the program in two processes, and returns their folder."""
    return processes.run_in_folder(
        tmp_path_factory.mktemp("resizing"), program, seconds=DEADLINE_SECONDS
    )


def errors_of(folder, worker):
    return json.loads((folder / f"{worker}.json").read_text())


def restored(folder, name):
    """Returns an embedding of this process with the new capacity."""
    embedding = plan.embedding()
    embedding.build()
    embedding.vocabularies["items"].resize(program.CAPACITY)
    tf.train.Checkpoint(embedding=embedding).read(
        str(folder / name)
    ).assert_existing_objects_matched()
    return embedding


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("other capacity", "Received: 24 in process 0, 32 in process 1."),
        ("zero", "ValueError: Argument `capacity` must be"),
        ("no integer", "TypeError: Argument `capacity` must be"),
        ("in a function", "`resize` must be called outside tf.function"),
        (
            "step in flight",
            "RuntimeError: A vocabulary cannot be resized while",
        ),
        ("step", "functions that were traced before the resize must be traced"),
        ("step again", "functions that were traced before the resize must be"),
        ("rows", "has replaced table items. Read `embedding_tables`"),
        ("blocks", "has replaced table items. Read `embedding_tables`"),
        ("sparse_read", "has replaced table items. Read `embedding_tables`"),
        (
            "sparse_read in a function",
            "and trace functions that read the table",
        ),
        ("delta", "must be created again with a new base"),
    ],
)
def test_all_processes_raise(folder, call, words):
    """The program checks that failed calls of `resize` change nothing."""
    for worker in range(2):
        assert words in errors_of(folder, worker)[call]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "failing"),
    [("keys", 1), ("tables", 1), ("rows", 1), ("an engine", 0)],
)
def test_an_error_of_one_process_is_raised_in_all(folder, what, failing):
    found = [
        errors_of(folder, worker)[f"no memory for {what}"]
        for worker in range(2)
    ]
    assert found[failing] == "MemoryError: full"
    assert found[1 - failing] == (
        f"RuntimeError: `resize` of table 'items' failed in process {failing}: "
        "MemoryError: full"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["end", "asynchronous"])
def test_a_checkpoint_after_a_resize_has_the_new_capacity(folder, name):
    found = keys_program.contents(restored(folder, name))
    assert found["items/parameters"].shape[0] > program.CAPACITY
    for worker in range(2):
        wanted = np.load(folder / f"{worker}.npz")
        for variable, value in found.items():
            np.testing.assert_array_equal(value, wanted[variable], variable)


@pytest.mark.slow
def test_a_delta_after_a_resize_equals_the_tables(folder, tmp_path):
    full = tlm.deltas.apply(
        folder / "new base", folder / "deltas", tmp_path / "full"
    )
    assert cases.tensors(full) == cases.tensors(str(folder / "end"))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_export_after_a_resize_equals_an_export_of_one_process(
    folder, tmp_path
):
    tlm.export(restored(folder, "end"), str(tmp_path / "wanted"))
    features, _ = plan.batch(6, 0)
    exports = [
        tf.saved_model.load(path)
        for path in (str(folder / "exported"), str(tmp_path / "wanted"))
    ]
    found, wanted = (one.serve(features) for one in exports)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
        assert np.any(value), name

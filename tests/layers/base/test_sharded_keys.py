"""Tests layers with open vocabularies in tables sharded over processes."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests import processes
from tests.contract.runtimes import tensors_in
from tests.layers.base import sharded_keys_program as program

# The processes run all cases of a Keras version.
DEADLINE_SECONDS = 900
LIBRARIES = ("keras", "tf_keras")
# Each Keras version takes several minutes. `tests/contract` trains layers with
# sharded open vocabularies in `make test`.
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def run(folder, library, count, *names):
    return processes.run_in_folder(
        folder,
        program,
        library,
        *names,
        seconds=DEADLINE_SECONDS,
        count=count,
    )


@pytest.fixture(scope="module", params=LIBRARIES)
def two_processes(request, tmp_path_factory):
    """Returns the Keras version and the folder with all results.

    The processes run only the cases whose results the selected tests read.
    """
    folder = tmp_path_factory.mktemp(request.param)
    names = processes.selected(request, "name")
    return request.param, run(
        folder,
        request.param,
        2,
        *(one for one in program.cases_of(request.param) if one in names),
    )


def results_of(folder, name, how, worker=0):
    return dict(np.load(folder / f"{name} {how} {worker}.npz"))


def check_same(folder, name, count):
    """Checks that sharded tables equal replicated tables bitwise."""
    for worker in range(count):
        expected = results_of(folder, name, program.REPLICATED, worker)
        found = results_of(folder, name, program.SHARDED, worker)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value, err_msg=key)
    return results_of(folder, name, program.SHARDED)


def check_saved(value, saved, name):
    """Checks a value bitwise; numpy files do not store the type bfloat16."""
    assert value.shape == saved.shape, name
    assert value.tobytes() == saved.tobytes(), name


@pytest.mark.parametrize(
    "name",
    [name for name in program.CASES if name != "folded"],
)
def test_sharded_tables_equal_replicated_tables_bitwise(name, two_processes):
    library, folder = two_processes
    if name not in program.cases_of(library):
        return
    found = check_same(folder, name, 2)
    # The last step of the vocabulary, and its statistics.
    assert found["values/items/vocabulary_numbers"][0] > 4
    # In "several_calls", lookups in flight protect all rows.
    assert (len(found["evicted"]) > 5) == (
        name not in ("keras_file", "several_calls")
    )
    assert len(found["values/items"]) == 81
    assert not np.isnan(found["predict"]).any()


@pytest.mark.parametrize("library", LIBRARIES)
def test_three_processes_equal_replicated_tables_bitwise(library, tmp_path):
    names = ("fit", "several_calls", "evict", "early_stopping")
    run(tmp_path, library, 3, *names)
    for name in names:
        check_same(tmp_path, name, 3)


@pytest.mark.parametrize("name", ["folded"])
def test_folded_gradients_admit_the_same_keys(name, two_processes):
    _, folder = two_processes
    expected = results_of(folder, name, program.REPLICATED)
    found = results_of(folder, name, program.SHARDED)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if value.dtype.kind == "i":
            np.testing.assert_array_equal(found[key], value, err_msg=key)
        elif value.dtype.kind == "f":
            np.testing.assert_allclose(
                found[key], value, 1e-4, 1e-4, err_msg=key
            )


def case_of_one_process(library):
    """Returns the model with the default strategy, after it was built."""
    one = program.Case(library, tf.distribute.get_strategy(), pathlib.Path(), 0)
    one.model.predict(one.data(1), verbose=0)
    return one


@pytest.mark.parametrize("name", ["keras_file"])
@pytest.mark.parametrize("worker", range(2))
def test_a_keras_file_of_each_process_contains_all_rows(
    worker, name, two_processes
):
    library, folder = two_processes
    expected = results_of(folder, name, program.SHARDED)
    version, layers = program.modules_of(library)
    assert layers.TPUEmbedding  # The import registers the class.
    model = version.models.load_model(
        folder / "keras_file sharded" / f"worker_{worker}/model.keras"
    )
    path = str(folder / f"loaded_{worker}")
    tf.train.Checkpoint(it=model.get_layer("tables").embedding).write(path)
    for name, value in tensors_in(path).items():
        check_saved(value, expected[f"values/{name}"], name)


@pytest.mark.parametrize("name", ["weight_file"])
@pytest.mark.parametrize("worker", range(2))
def test_a_weight_file_of_each_process_contains_all_rows(
    worker, name, two_processes
):
    library, folder = two_processes
    expected = results_of(folder, name, program.SHARDED)
    one = case_of_one_process(library)
    one.folder = folder / "loaded"
    one.model.load_weights(
        folder / "weight_file sharded" / f"worker_{worker}/model.weights.h5"
    )
    for name, value in one.values().items():
        check_saved(value, expected[name], name)


@pytest.mark.parametrize("name", ["export"])
def test_an_exported_model_returns_the_predictions(name, two_processes):
    library, folder = two_processes
    one = program.Case(library, tf.distribute.get_strategy(), pathlib.Path(), 0)
    served = tf.saved_model.load(str(folder / "export sharded" / "exported"))
    found = np.concatenate(
        [served.serve(keys) for keys, _ in one.data(2, seed=7)]
    )
    expected = results_of(folder, name, program.SHARDED)["predict"]
    np.testing.assert_array_equal(found, expected)

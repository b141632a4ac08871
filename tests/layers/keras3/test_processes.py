"""Tests `fit` of Keras 3 models in several processes."""

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

from tests import processes, strategies
from tests.layers.keras3 import process_program as program
from tf_layoutmap._core import patches
from tf_layoutmap.layers.keras3 import process_fit

DEADLINE_SECONDS = 900


# The programs that `make test` runs; all others are exhaustive.
FAST = (
    "batches of different sizes",
    "order of arrays",
)


def cases(names):
    """Returns the values of `parametrize` for some programs."""
    return [
        (name, how)
        if name in FAST and how == program.last_placement(name)
        else pytest.param(name, how, marks=pytest.mark.exhaustive)
        for name, how in program.CASES
        if name in names
    ]


@pytest.fixture(scope="module")
def two_processes(request, tmp_path_factory):
    """Returns the folder with the results of two processes.

    The processes run only the programs whose results the selected tests read.
    """
    return processes.run_in_folder(
        tmp_path_factory.mktemp("two"),
        program,
        *processes.selected(request, "name"),
        seconds=DEADLINE_SECONDS,
    )


def results_of(folder, name, how):
    """Returns the results of each process."""
    return [
        dict(np.load(folder / f"{name} {how} {worker}.npz"))
        for worker in range(2)
    ]


@functools.cache
def expected_results(name, num_replicas):
    return program.PROGRAMS[name](strategies.mirrored(num_replicas), {})


def assert_equal(found, expected, compare=np.testing.assert_array_equal):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        compare(found[name], value, err_msg=name)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), cases(program.PROGRAMS))
def test_two_processes_equal_two_replicas_of_one_process(
    name, how, two_processes
):
    first, second = results_of(two_processes, name, how)
    assert_equal(first, second)
    if name in program.WITHOUT_REFERENCE:
        return
    expected = expected_results(name, 2)
    for key, value in expected.items():
        assert np.all(np.isfinite(value)), key
    assert_equal(first, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    cases(
        (
            "two steps per execution",
            "data of unknown size",
            "generator",
            "ShardedEmbedding",
        )
    ),
)
def test_tables_are_bitwise_equal_to_those_of_one_replica(
    name, how, two_processes
):
    found, _ = results_of(two_processes, name, how)
    expected = expected_results(name, 1)
    tables = [key for key in expected if key.startswith("table/")]
    assert tables
    for key in tables:
        np.testing.assert_array_equal(found[key], expected[key], key)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", ["order of arrays"])
def test_each_epoch_contains_each_sample_once(name, two_processes):
    found, _ = results_of(two_processes, name, program.REPLICATED)
    for shuffle in (True, "batch"):
        after_three, after_six = found[f"counts {shuffle}"]
        np.testing.assert_array_equal(after_three, 3)
        np.testing.assert_array_equal(after_six, 6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["order of arrays"])
def test_batches_that_keras_would_shuffle_raise(name, two_processes):
    found, _ = results_of(two_processes, name, program.REPLICATED)
    assert "`shuffle` must be False under Multi" in str(found["error"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_models_of_one_process_do_not_change(num_replicas):
    name = "model without tables"
    expected = expected_results(name, num_replicas)
    patches.install("keras3_processes")
    try:
        found = program.PROGRAMS[name](strategies.mirrored(num_replicas), {})
    finally:
        patches.uninstall("keras3_processes")
    assert_equal(found, expected)


@pytest.fixture(autouse=True)
def no_global_seed():
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(None)


@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_the_order_of_arrays_depends_only_on_the_seed(shuffle):
    def orders(seed, global_seed):
        tf.random.set_seed(global_seed)
        arrays = process_fit.ShuffledArrays(
            seed, np.arange(11), batch_size=4, shuffle=shuffle
        )
        batches = arrays.get_tf_dataset()
        return [[one.numpy().tolist() for one in batches] for _ in range(2)]

    first, second = orders(5, 1)
    for epoch in (first, second):
        assert [len(one) for one in epoch] == [4, 4, 3]
        samples = [sorted(one) for one in epoch]
        if shuffle is True:
            samples = [sorted(sum(samples, []))]
            assert samples == [list(range(11))]
        else:
            assert samples == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert first != second
    assert orders(5, 2) == [first, second]
    assert orders(6, 1) != [first, second]


def in_memory():
    return tf.data.Dataset.range(8)


class OtherProcesses:
    """Stands in for processes, the second of which sends a given text."""

    def __init__(self, text=None):
        self._text = text

    def gather_texts(self, text):
        return [text, self._text or text]


@pytest.mark.parametrize(
    ("make", "is_random"),
    [
        (lambda: in_memory().batch(2), False),
        (lambda: in_memory().shuffle(8).batch(2).prefetch(1), True),
        (lambda: in_memory().shuffle(8, seed=3).batch(2), False),
        (
            lambda: tf.data.Dataset.zip(in_memory().shuffle(8), in_memory()),
            True,
        ),
        # TensorFlow can shard the files of such a dataset.
        (
            lambda: (
                in_memory()
                .shuffle(8)
                .interleave(lambda _: tf.data.TFRecordDataset("file"))
            ),
            False,
        ),
    ],
    ids=["no shuffle", "no seed", "seed", "zip", "files"],
)
def test_a_dataset_that_is_shuffled_without_a_seed_warns(make, is_random):
    with (
        pytest.warns(UserWarning, match="same seed in all processes")
        if is_random
        else contextlib.nullcontext()
    ):
        process_fit.warn_of_random_order(OtherProcesses(), make())


def test_a_dataset_with_another_seed_in_another_process_warns():
    other = OtherProcesses("[(2, 3)]")
    with pytest.warns(UserWarning, match="same seed in all processes"):
        process_fit.warn_of_random_order(other, in_memory().shuffle(8, seed=3))


def test_a_dataset_that_tensorflow_does_not_shard_does_not_warn():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    process_fit.warn_of_random_order(
        OtherProcesses(), in_memory().shuffle(8).with_options(options)
    )

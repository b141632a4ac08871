"""Tests of the emulation in separate processes, one for each TPU.

Each test reports the failures of one file of programs/. The cases of the
programs that are marked as exhaustive run in exhaustive tests of this file.
"""

import importlib.util
import subprocess
import sys

import pytest

from tests.emulation import runner

KERAS_RS = ("keras_rs_fit",) if importlib.util.find_spec("keras_rs") else ()


def run_code(code):
    """Runs Python code in a separate process."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=runner.ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        env=runner.environment(),
        check=False,
    )


@pytest.fixture(scope="module")
def two_cores():
    """Returns the failures of each program for two cores on one host."""
    return runner.run_programs(
        "one_host",
        "keras_fit",
        *KERAS_RS,
        "any_order",
        "sparse_core_ops",
        "sparse_core_steps",
        "one_script",
        TF_LAYOUTMAP_NUM_CORES="2",
    )


@pytest.fixture(scope="module")
def two_hosts():
    """Returns the failures of each program for four cores on two hosts."""
    return runner.run_programs("two_hosts", "three_settings", "names_of_tpus")


@pytest.mark.slow
@pytest.mark.parametrize(
    "tpu", ["v5p", pytest.param("v6e", marks=pytest.mark.exhaustive)]
)
def test_embeddings_train_on_sparse_cores(tpu):
    names = ("sparse_core_training", "sparse_core_embedding", "one_script")
    found = runner.run_programs(*names, TF_LAYOUTMAP_TPU=tpu)
    for name in names:
        assert not found[name], found[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "marks",
    [
        "not exhaustive",
        pytest.param("exhaustive", marks=pytest.mark.exhaustive),
    ],
)
def test_checkpoints_move_between_sparse_cores_and_other_devices(
    marks, tmp_path
):
    name = "sparse_core_checkpoints"
    # Each process reads the files of the previous processes.
    processes = [("v5p", 2), ("v4", 2), ("v5p", 4)]
    if marks == "exhaustive":
        processes.append(("v6e", 4))
    for tpu, num_cores in processes:
        found = runner.run_programs(
            name,
            marks=marks,
            TF_LAYOUTMAP_TPU=tpu,
            TF_LAYOUTMAP_NUM_CORES=str(num_cores),
            TF_LAYOUTMAP_EXCHANGE=str(tmp_path),
        )
        assert not found[name], found[name]


@pytest.fixture(scope="module")
def one_host_of_four(tmp_path_factory):
    """Returns the failures of each program for four cores on one host."""
    exchange = str(tmp_path_factory.mktemp("exchange"))
    # The program `saving` reads these files when it runs with another number of
    # hosts.
    four_hosts = runner.run_programs(
        "saving", TF_LAYOUTMAP_NUM_HOSTS="4", TF_LAYOUTMAP_EXCHANGE=exchange
    )
    found = runner.run_programs(
        "saving",
        # All tests of this program run on four hosts.
        keyword="another_number_of_hosts",
        TF_LAYOUTMAP_NUM_HOSTS="1",
        TF_LAYOUTMAP_NUM_CORES="4",
        TF_LAYOUTMAP_EXCHANGE=exchange,
    )
    found["saving on four hosts"] = four_hosts["saving"]
    return found


@pytest.mark.slow
def test_programs_for_two_cores_on_one_host_pass(two_cores):
    assert not two_cores["one_host"], two_cores["one_host"]


@pytest.mark.slow
def test_host_ops_of_sparse_cores_match_the_reference(two_cores):
    assert not two_cores["sparse_core_ops"], two_cores["sparse_core_ops"]


@pytest.mark.slow
def test_device_ops_of_sparse_cores_match_the_host_engine(two_cores):
    assert not two_cores["sparse_core_steps"], two_cores["sparse_core_steps"]


@pytest.mark.slow
def test_one_script_with_the_second_class_gives_equal_results(two_cores):
    assert not two_cores["one_script"], two_cores["one_script"]


@pytest.mark.slow
def test_programs_for_four_cores_on_two_hosts_pass(two_hosts):
    assert not two_hosts["two_hosts"], two_hosts["two_hosts"]


@pytest.mark.slow
def test_one_script_gives_equal_results_in_three_settings(two_hosts):
    assert not two_hosts["three_settings"], two_hosts["three_settings"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_checkpoints_restore_on_other_numbers_of_hosts(one_host_of_four):
    for name in ("saving on four hosts", "saving"):
        assert not one_host_of_four[name], one_host_of_four[name]


@pytest.mark.slow
def test_device_names_and_step_names_match_a_tpu(two_hosts):
    assert not two_hosts["names_of_tpus"], two_hosts["names_of_tpus"]


@pytest.mark.slow
def test_a_keras_layer_trains_in_fit(two_cores):
    assert not two_cores["keras_fit"], two_cores["keras_fit"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_cores", [2, pytest.param(4, marks=pytest.mark.exhaustive)]
)
def test_unmodified_keras_rs_trains(num_cores, request):
    pytest.importorskip(
        "keras_rs", reason="requires keras-rs, which `make` installs"
    )
    found = (
        request.getfixturevalue("two_cores")
        if num_cores == 2
        else runner.run_programs(
            "keras_rs_fit",
            TF_LAYOUTMAP_NUM_HOSTS="1",
            TF_LAYOUTMAP_NUM_CORES="4",
        )
    )["keras_rs_fit"]
    assert not found, found


@pytest.mark.slow
def test_calls_in_any_order_match_the_reference(two_cores):
    assert not two_cores["any_order"], two_cores["any_order"]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "names, marks, setting",
    [
        (
            ("one_host", "keras_fit", *KERAS_RS, "any_order"),
            "exhaustive",
            {"NUM_CORES": "2"},
        ),
        (
            ("two_hosts", "three_settings", "names_of_tpus"),
            "exhaustive",
            {},
        ),
        (("saving",), "exhaustive", {"NUM_HOSTS": "4"}),
        # Only files are exchanged in `make test`.
        (("saving",), "", {"NUM_HOSTS": "1", "NUM_CORES": "4"}),
    ],
    ids=["two_cores", "two_hosts", "four_hosts", "one_host"],
)
def test_exhaustive_cases_of_programs_pass(names, marks, setting):
    variables = {f"TF_LAYOUTMAP_{name}": one for name, one in setting.items()}
    found = runner.run_programs(*names, marks=marks, **variables)
    failed = "\n".join(found.values())
    # Some programs have no exhaustive cases.
    assert all(
        not one or one.startswith("no test was run") for one in found.values()
    ), failed
    assert not all(found.values()), failed


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        "emulation",
        "tpu_v5p_v6e",
        "run_on_a_cloud_tpu",
        "move_tables_between_devices",
    ],
)
@pytest.mark.covering(None)
def test_the_snippets_of_a_page_with_a_tpu_run(page):
    runner.run("docs/test_snippets.py", "-k", page)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_program_can_assign_our_classes_to_the_names_of_tensorflow():
    done = run_code(
        """
import tensorflow as tf
import tf_layoutmap as tlm
tpu = tf.tpu.experimental.embedding
tpu.TPUEmbedding = tlm.TPUEmbedding
tpu.TPUEmbeddingV2 = tlm.TPUEmbeddingV2
strategy = tlm.emulation.enable(num_cores=2, tpu="v5p")
words = tpu.TableConfig(64, 8, tf.ones, name="words")
with strategy.scope():
    embedding = tpu.TPUEmbeddingV2(
        [tpu.FeatureConfig(words, output_shape=[8])], tpu.SGD(1.0)
    )
@tf.function
def look_up():
    return strategy.run(lambda: embedding([tf.range(8)])[0])
print(strategy.experimental_local_results(look_up()[0])[1].numpy().sum())
"""
    )
    assert done.stdout == "64.0\n", done.stderr


@pytest.mark.slow
def test_enable_in_an_unsuitable_process_raises():
    done = run_code(
        """
import tensorflow as tf
tf.constant(1.0)
import tf_layoutmap as tlm
def error_of_enable():
    try:
        tlm.emulation.enable(num_cores=2)
    except RuntimeError as error:
        return str(error)
print(error_of_enable())
# TensorFlow treats this library as a runtime that registered kernels.
from tf_layoutmap._core import ops
tf.load_op_library(str(ops._EMULATION))
print(error_of_enable())
try:
    tlm.emulation.report()
except RuntimeError as error:
    print(error)
"""
    )
    assert done.returncode == 0, done.stderr
    started, foreign, disabled = done.stdout.splitlines()
    assert "only before its first operation" in started
    assert "TensorFlow has already started with 1" in started
    assert "a process with a TPU runtime" in foreign
    assert "`tlm.emulation.enable` first" in disabled

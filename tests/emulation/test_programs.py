"""The emulation, in processes of its own."""

import subprocess
import sys

import pytest

from tests.emulation import runner


@pytest.mark.slow
def test_two_cores_on_one_host():
    runner.run("emulation/programs/one_host.py")


@pytest.mark.slow
def test_four_cores_on_two_hosts():
    runner.run("emulation/programs/two_hosts.py")


@pytest.mark.slow
def test_one_script_in_three_settings():
    runner.run("emulation/programs/three_settings.py")


@pytest.mark.slow
def test_checkpoints_go_between_numbers_of_hosts(tmp_path):
    for num_hosts in (4, 1):
        runner.run("emulation/programs/saving.py",
                   TF_LAYOUTMAP_NUM_HOSTS=str(num_hosts),
                   TF_LAYOUTMAP_EXCHANGE=str(tmp_path))


@pytest.mark.slow
def test_names_of_devices_and_steps():
    runner.run("emulation/programs/names_of_tpus.py")


@pytest.mark.slow
def test_a_keras_layer_in_fit():
    runner.run("emulation/programs/keras_fit.py")


@pytest.mark.slow
@pytest.mark.parametrize("num_cores", [2, 4])
def test_keras_rs_as_it_is(num_cores):
    pytest.importorskip(
        "keras_rs", reason="keras-rs, which `make` installs, is not there")
    runner.run("emulation/programs/keras_rs_fit.py", seconds=900,
               TF_LAYOUTMAP_NUM_CORES=str(num_cores))


@pytest.mark.slow
def test_calls_in_any_order():
    runner.run("emulation/programs/any_order.py")


@pytest.mark.slow
def test_the_page_about_it_runs():
    runner.run("docs/test_snippets.py", "-k", "emulation")


@pytest.mark.slow
def test_a_process_that_cannot_emulate_is_refused_with_the_reason():
    done = subprocess.run(
        [sys.executable, "-c", """
import tensorflow as tf
tf.constant(1.0)
import tf_layoutmap as tlm
def refusal():
    try:
        tlm.emulation.enable(num_cores=2)
    except RuntimeError as error:
        return str(error)
print(refusal())
# To TensorFlow this is a runtime that has kernels already.
from tf_layoutmap import _ops
tf.load_op_library(str(_ops._EMULATION))
print(refusal())
try:
    tlm.emulation.report()
except RuntimeError as error:
    print(error)
"""], cwd=runner.ROOT, text=True, capture_output=True, timeout=120,
        env=runner.environment(), check=False)
    assert done.returncode == 0, done.stderr
    started, foreign, disabled = done.stdout.splitlines()
    assert "only before its first operation" in started
    assert "TensorFlow that has started with 1" in started
    assert "a process with a TPU runtime" in foreign
    assert "`tlm.emulation.enable` first" in disabled

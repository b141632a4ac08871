"""Tests `fit` of both Keras versions on parameter servers."""

import json
import random
import time

import pytest

from tests import covering, processes
from tests.ps.cluster import Cluster
from tests.ps.fit import restarting, two_workers
from tests.ps.train import RATE

pytestmark = pytest.mark.slow  # Starts clusters.

_SECONDS = 400


@pytest.fixture(
    scope="module", params=covering.but(["keras", "tf_keras"], "tf_keras")
)
def found(request, tmp_path_factory):
    # The program runs only the cases that the selected tests read.
    selected = sorted(processes.selected(request, "case"))
    return processes.run_program(
        "tests.ps.fit.program",
        request.param,
        str(tmp_path_factory.mktemp(request.param)),
        "arrays" if request.param == "keras" else "backups_of_batches",
        *selected,
        seconds=_SECONDS,
    )


@pytest.mark.parametrize("case", ["trains_bitwise_equal"])
def test_one_worker_trains_bitwise_equal_tables_weights_and_metrics(
    found, case
):
    is_same_history, are_same, num_updates, iterations = found[case]
    assert is_same_history
    assert all(are_same)
    assert num_updates == iterations == 6


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["bfloat16_on_the_wire"])
def test_a_layer_can_transfer_rows_as_bfloat16(found, case):
    wire, are_same, is_close = found[case]
    assert wire == "bfloat16"
    # The first two values are the tables. Other weights may be equal, because
    # some of them are always 0.
    assert not any(are_same[:2])
    assert is_close


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["files_are_exchanged"])
def test_files_are_exchanged_between_servers_and_one_process(found, case):
    read, written, is_loaded = found[case]
    assert all(read)
    assert all(written)
    assert is_loaded


@pytest.mark.parametrize("case", ["tables_in_layers"])
def test_tables_in_layers_are_bitwise_equal_to_one_process(found, case):
    trained, saved, loaded, jobs = found[case]
    assert all(trained)
    assert all(saved)
    assert all(loaded)
    assert jobs == ["job:ps"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["keys_in_layers"])
def test_open_vocabularies_in_layers_equal_one_process(found, case):
    assert found[case] == [True] * 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["predicts_evaluates_and_exports"])
def test_predict_evaluate_and_export_equal_one_process(found, case):
    assert found[case] is True


@pytest.mark.parametrize("case", ["callbacks_work"])
def test_callbacks_are_called_and_a_backup_resumes(found, case):
    interrupted, has_best, epochs, last_batch, are_same, has_val, stopped = (
        found[case]
    )
    assert interrupted
    assert has_best
    assert epochs == [1]
    assert last_batch == 2
    assert all(are_same)
    assert has_val
    assert stopped == 2


@pytest.mark.parametrize("case", ["steps_of_an_epoch"])
def test_an_epoch_ends_after_its_steps_or_with_its_dataset(found, case):
    steps, last_batch, short, num_epochs = found[case]
    assert steps == 10
    assert last_batch == 4
    assert short == 6
    assert num_epochs == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["called_twice"])
def test_a_layer_called_twice_per_step_equals_one_process(found, case):
    is_same_history, are_same, num_updates, staleness = found[case]
    assert is_same_history
    assert all(are_same)
    # The gradients of both calls are one update.
    assert num_updates == 6
    assert staleness == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["accumulated_gradients"])
def test_accumulated_gradients_equal_one_process_in_keras_3(found, case):
    # 3 of 6 steps apply the mean of two gradients.
    assert found[case] in (None, [[True, True, 3]] * 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["regularizers_and_constraints"])
def test_regularizers_and_constraints_equal_one_process(found, case):
    assert len(found[case]) == 6
    for name, are_same in found[case].items():
        assert all(are_same), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["several_steps_per_execution"])
def test_several_steps_per_execution_equal_one_process(found, case):
    assert found[case] == [[True, True, 6]] * 2


@pytest.mark.parametrize("case", ["automatic_steps"])
def test_an_automatic_number_of_steps_does_not_change_the_results(found, case):
    assert found[case] == [[1, 3], True, True, 6]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["callbacks_of_executions"])
def test_callbacks_are_called_after_complete_executions(found, case):
    steps, iterations, num_updates = found[case]
    assert iterations == num_updates == steps[-1] == 42
    # A round is a number of complete executions, except at the end.
    assert len(steps) > 1
    assert all(one % 4 == 0 for one in steps[:-1])


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "case, words",
    [
        ("bad_id", "Feature 'b', sample 0: id"),
        ("other_logs", "must return the results of the model's metrics"),
        ("too_many_steps", "`steps_per_execution` must be at most 512"),
        ("other_steps", "equal to `steps_per_execution` of `compile`"),
        ("with_labels", "Argument `y` of `fit` must not be passed"),
        (
            "with_weights_of_classes",
            "sample weights, (x, y, sample_weight). Received: {0: 2.0}",
        ),
        ("no_steps", "Argument `steps_per_epoch` must be at least 1"),
        (
            "call_in_a_function",
            "remove `@tf.function` from the function that calls",
        ),
        ("without_servers", "in the scope of a ParameterServerStrategy"),
        ("eager", "run_eagerly=False"),
        ("predicted", "Argument `x` of `predict` on parameter servers"),
        ("no_function", "Argument `dataset_fn` must be callable"),
        ("no_time", "Argument `step_deadline` must be like"),
        ("no_such_answer", "`on_server_loss` must be one of"),
        ("no_cluster", "if the strategy is not from `tlm.ps.connect`"),
        ("no_dataset", "`dataset_fn` must return a tf.data.Dataset"),
        ("no_batches", "must return datasets with batches"),
    ],
)
def test_unsupported_models_and_arguments_raise(found, case, words):
    assert words in found[case].replace("\\", "")


def test_arrays_raise_with_the_supported_argument_in_keras_3(found):
    # Only Keras 3 has this case, because `fit` of tf_keras accepts arrays.
    assert "must be tlm.ps.Datasets" in found.get(
        "arrays", "must be tlm.ps.Datasets"
    )


def test_unsupported_backup_frequency_raises_in_tf_keras(found):
    assert 'must be "epoch" on' in found.get(
        "backups_of_batches", 'must be "epoch" on'
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_two_workers_train_uneven_datasets_while_workers_restart(
    tmp_path, steps_per_execution
):
    dice = random.Random(2)
    with Cluster(tmp_path) as cluster:
        cluster.train(steps_per_execution, module="tests.ps.fit.two_workers")
        cluster.wait_for("UNEVEN", 120)
        for _ in range(3):
            time.sleep(dice.uniform(0.2, 1))
            cluster.restart("worker", dice.randrange(2))
        # The first eight steps form one round, which can last longer than the
        # restarts.
        cluster.wait_for("TRAINED 9", 90)
        found = cluster.finish(90)
    num_steps = sum(two_workers.SIZES)
    assert found["ends"] == [num_steps] * two_workers.NUM_EPOCHS
    total = num_steps * two_workers.NUM_EPOCHS
    assert found["iterations"] == total
    assert found["uneven_row"] == -RATE * total
    assert found["mean"] == pytest.approx(found["expected_mean"], rel=1e-6)
    # Only one worker can accumulate gradients.
    error, is_unchanged = found["accumulation_error"]
    assert (
        "`gradient_accumulation_steps` of the optimizer must be None" in error
    )
    assert "Received: 2 workers" in error
    assert is_unchanged
    # Each step must be applied once, even if a worker was restarted during the
    # step.
    assert found["num_steps"] >= 9
    assert found["row"] == [-RATE * found["num_steps"]] * 4


@pytest.mark.exhaustive
def test_a_lost_server_ends_fit_with_its_address(tmp_path):
    with Cluster(tmp_path, num_workers=1) as cluster:
        cluster.train(module="tests.ps.fit.two_workers")
        cluster.wait_for("UNEVEN", 120)
        cluster.send("ps", 1)
        line = cluster.wait_for("ServerLostError: ", 60)
        assert f"ps 1 at {cluster.jobs['ps'][1]} accepts no" in line
        assert "BackupAndRestore" in line
        assert cluster.code(30) != 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "keras, when",
    [
        # The server is killed during a backup, from which training must not
        # resume.
        ("keras", "WRITING"),
        ("tf_keras", f"FIRST [{restarting.HALF_WRITTEN}"),
    ],
)
def test_a_program_restarts_from_its_backup_after_a_lost_server(
    tmp_path, keras, when
):
    with Cluster(tmp_path, num_workers=1) as cluster:
        cluster.train(keras, module="tests.ps.fit.restarting")
        cluster.wait_for(when, 150)
        process = cluster.processes["chief", 0].pid
        cluster.restart("ps", 1)
        cluster.wait_for("This program restarts", 60)
        began = cluster.wait_for("LATER", 150)
        found = cluster.finish(60)
        assert cluster.processes["chief", 0].pid == process
        lines = cluster.log("chief").read_text().splitlines()
    epoch, _ = json.loads(began.removeprefix("LATER "))
    assert epoch >= restarting.HALF_WRITTEN - 1
    assert found["num_epochs"] > epoch
    for line in lines:
        if line.startswith(("FIRST", "LATER")):
            epoch, row = json.loads(line.split(" ", 1)[1])
            assert row == [-RATE * restarting.NUM_STEPS * epoch] * 4
    assert (
        found["row"] == [-RATE * restarting.NUM_STEPS * found["num_epochs"]] * 4
    )

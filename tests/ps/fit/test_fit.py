"""`fit` of both Keras over parameter servers."""

import json
import random
import time

import pytest

from tests import processes
from tests.ps.cluster import Cluster
from tests.ps.fit import restarting, two_workers
from tests.ps.train import RATE

pytestmark = pytest.mark.slow  # Clusters.

_SECONDS = 400


@pytest.fixture(scope="module", params=["keras", "tf_keras"])
def found(request, tmp_path_factory):
    return processes.run_program(
        "tests.ps.fit.program",
        request.param,
        str(tmp_path_factory.mktemp(request.param)),
        seconds=_SECONDS,
    )


def test_one_worker_trains_tables_weights_and_metrics_to_the_bit(found):
    is_same_history, are_same, num_updates, iterations = found[
        "trains_to_the_bit"
    ]
    assert is_same_history
    assert all(are_same)
    assert num_updates == iterations == 6


def test_rows_of_a_layer_may_travel_as_bfloat16(found):
    wire, are_same, is_close = found["bfloat16_on_the_wire"]
    assert wire == "bfloat16"
    assert not any(are_same[:2])  # The tables; weights that take marks stay 0.
    assert is_close


def test_files_go_between_servers_and_one_process(found):
    read, written, whole = found["files_go_both_ways"]
    assert all(read)
    assert all(written)
    assert whole


def test_tables_in_layers_are_those_of_one_process_to_the_bit(found):
    trained, saved, loaded, jobs = found["tables_in_layers"]
    assert all(trained)
    assert all(saved)
    assert all(loaded)
    assert jobs == ["job:ps"]


def test_so_are_keys_in_layers_their_rows_counts_and_files(found):
    assert found["keys_in_layers"] == [True] * 5


def test_predicts_evaluates_and_exports(found):
    assert found["predicts_evaluates_and_exports"] is True


def test_callbacks_are_told_and_a_backup_goes_on(found):
    interrupted, has_best, epochs, last_batch, are_same, has_val, stopped = (
        found["callbacks_work"]
    )
    assert interrupted
    assert has_best
    assert epochs == [1]
    assert last_batch == 2
    assert all(are_same)
    assert has_val
    assert stopped == 2


def test_an_epoch_has_as_many_steps_as_asked_for_or_as_there_are(found):
    steps, last_batch, short, num_epochs = found["steps_of_an_epoch"]
    assert steps == 10
    assert last_batch == 4
    assert short == 6
    assert num_epochs == 2


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "case, words",
    [
        ("bad_id", "Feature 'b', sample 0: id"),
        ("other_logs", "must return the results of the model's metrics"),
        ("called_twice", "must be called once in a training step"),
        ("constrained", "Argument `embeddings_constraint` must be None"),
        ("with_labels", "Argument `y` of `fit` must be left out"),
        (
            "with_weights_of_classes",
            "weights of samples, (x, y, sample_weight). Received: {0: 2.0}",
        ),
        ("no_steps", "Argument `steps_per_epoch` must be at least 1"),
        (
            "call_in_a_function",
            "remove `@tf.function` from what calls the layer",
        ),
        ("without_servers", "in the scope of a ParameterServerStrategy"),
        ("eager", "run_eagerly=False"),
        ("predicted", "Argument `x` of `predict` must be arrays"),
        ("no_function", "Argument `dataset_fn` must be callable"),
        ("no_time", "Argument `step_deadline` must be like"),
        ("no_such_answer", "`on_server_loss` must be one of"),
        ("no_cluster", "but under what `tlm.ps.connect` returned"),
        ("no_dataset", "`dataset_fn` must return a tf.data.Dataset"),
        ("no_batches", "must make datasets with batches"),
    ],
)
def test_what_cannot_train_is_refused(found, case, words):
    assert words in found[case].replace("\\", "")


def test_keras_3_says_what_it_wants_instead_of_arrays(found):
    # tf_keras makes datasets of arrays itself.
    assert "must be tlm.ps.Datasets" in found.get(
        "arrays", "must be tlm.ps.Datasets"
    )


def test_backups_that_tf_keras_would_not_write_are_refused(found):
    assert 'must be "epoch" over' in found.get(
        "backups_of_batches", 'must be "epoch" over'
    )


def test_two_workers_with_uneven_datasets_and_one_that_dies(tmp_path):
    dice = random.Random(2)
    with Cluster(tmp_path) as cluster:
        cluster.train(module="tests.ps.fit.two_workers")
        cluster.wait_for("UNEVEN", 120)
        for _ in range(3):
            time.sleep(dice.uniform(0.2, 1))
            cluster.restart("worker", dice.randrange(2))
        # The first eight steps are one round, which may outlast all deaths.
        cluster.wait_for("TRAINED 9", 90)
        found = cluster.finish(90)
    num_steps = sum(two_workers.SIZES)
    assert found["ends"] == [num_steps] * two_workers.NUM_EPOCHS
    total = num_steps * two_workers.NUM_EPOCHS
    assert found["iterations"] == total
    assert found["uneven_row"] == -RATE * total
    assert found["mean"] == pytest.approx(found["expected_mean"], rel=1e-6)
    # However often workers died, each step counts once.
    assert found["num_steps"] >= 9
    assert found["row"] == [-RATE * found["num_steps"]] * 4


def test_a_server_that_dies_ends_fit_with_its_address(tmp_path):
    with Cluster(tmp_path, num_workers=1) as cluster:
        cluster.train(module="tests.ps.fit.two_workers")
        cluster.wait_for("UNEVEN", 120)
        cluster.send("ps", 1)
        line = cluster.wait_for("ServerLostError: ", 60)
        assert f"ps 1 at {cluster.jobs['ps'][1]} accepts no" in line
        assert "BackupAndRestore" in line
        assert cluster.code(30) != 0


@pytest.mark.parametrize(
    "keras, when",
    [
        # In the middle of a backup, which is not to be gone on from.
        ("keras", "WRITING"),
        ("tf_keras", f"FIRST [{restarting.HALF_WRITTEN}"),
    ],
)
def test_or_the_program_starts_anew_from_its_backup(tmp_path, keras, when):
    with Cluster(tmp_path, num_workers=1) as cluster:
        cluster.train(keras, module="tests.ps.fit.restarting")
        cluster.wait_for(when, 150)
        process = cluster.processes["chief", 0].pid
        cluster.restart("ps", 1)
        cluster.wait_for("This program starts anew", 60)
        began = cluster.wait_for("LATER", 150)
        found = cluster.finish(60)
        assert cluster.processes["chief", 0].pid == process
        told = cluster.log("chief").read_text().splitlines()
    epoch, _ = json.loads(began.removeprefix("LATER "))
    assert epoch >= restarting.HALF_WRITTEN - 1
    assert found["num_epochs"] > epoch
    for line in told:
        if line.startswith(("FIRST", "LATER")):
            epoch, row = json.loads(line.split(" ", 1)[1])
            assert row == [-RATE * restarting.NUM_STEPS * epoch] * 4
    assert (
        found["row"] == [-RATE * restarting.NUM_STEPS * found["num_epochs"]] * 4
    )

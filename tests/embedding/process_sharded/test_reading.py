"""Reads, exports and asynchronous checkpoints of sharded tables."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import processes, strategies
from tests.deltas import cases
from tests.embedding.process_sharded import deltas_program as plan
from tests.embedding.process_sharded import tables_program as program

# Starting the processes takes most of the time of a test.
DEADLINE_SECONDS = 240

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture(scope="module", params=[2, 3])
def folder(request, tmp_path_factory):
    """Folder with the results of two or three processes."""
    return processes.run_in_folder(
        tmp_path_factory.mktemp("tables"),
        program,
        seconds=DEADLINE_SECONDS,
        count=request.param,
    )


def workers_of(folder):
    return range(len(list(folder.glob("?.npz"))))


def restored(path):
    """Returns an embedding in one process with the values of a checkpoint."""
    one = plan.embedding()
    one.build()
    tf.train.Checkpoint(embedding=one).read(str(path)).assert_consumed()
    return one


def trained_here(folder, num_steps):
    """Returns an embedding that was trained from `base` in one process."""
    num_replicas = len(workers_of(folder))
    strategy = strategies.mirrored(num_replicas)
    with strategy.scope():
        one = plan.embedding()
    one.build()
    tf.train.Checkpoint(embedding=one).read(
        str(folder / "base")
    ).assert_consumed()
    step = plan.train_step(one, strategy)
    for number in range(num_steps):
        batches = [
            plan.batch(number, replica) for replica in range(num_replicas)
        ]
        step(
            *(
                tf.nest.map_structure(
                    lambda *parts: (
                        strategy.experimental_distribute_values_from_function(
                            lambda context: parts[
                                context.replica_id_in_sync_group
                            ]
                        )
                    ),
                    *[one[part] for one in batches],
                )
                for part in range(2)
            )
        )
    return one


def test_all_processes_read_the_rows_of_a_checkpoint(folder):
    one = restored(folder / "after_delta")
    tables = {
        config.name: tf.cast(rows, tf.float32).numpy()
        for config, rows in one.embedding_tables.items()
    }
    for config, slots in one.slot_variables.items():
        for name, slot in slots.items():
            tables[f"{config.name}/{name}"] = slot.numpy()
    for worker in workers_of(folder):
        found = np.load(folder / f"{worker}.npz")
        for name, rows in tables.items():
            np.testing.assert_array_equal(found[name], rows, err_msg=name)
        rows = tables["words"][program.ids_of(worker)]
        np.testing.assert_array_equal(found["read"], rows)
        np.testing.assert_array_equal(found["read in a step"], rows)
        activations = one(plan.batch(9, worker)[0])
        for name, value in activations.items():
            np.testing.assert_array_equal(found[f"activation/{name}"], value)


@pytest.mark.parametrize("rows", program.FORMATS)
def test_exports_equal_an_export_of_one_process(folder, tmp_path, rows):
    one = trained_here(folder, 2)
    report = tlm.export(one, str(tmp_path / "here"), row_format=rows)
    for worker in workers_of(folder):
        reports = json.loads((folder / f"reports_{worker}.json").read_text())
        for found, table in zip(reports[rows], report.tables, strict=True):
            # The mean error is a sum over blocks of other sizes.
            assert found.pop("mean_error") == pytest.approx(table.mean_error)
            expected = dataclasses.asdict(table)
            del expected["mean_error"]
            assert found == expected
    prefix = "variables/variables"
    found, expected = (
        {
            name: value
            for name, value in cases.tensors(str(where / prefix)).items()
            if name.startswith("tables/")
        }
        for where in (folder / rows, tmp_path / "here")
    )
    assert found and found == expected


@pytest.mark.parametrize("rows", program.FORMATS)
def test_served_models_apply_deltas_of_all_processes(folder, tmp_path, rows):
    """The lookups equal the lookups of an export after the delta."""
    served = tlm.deltas.ServedModel(str(folder / rows))
    features = {
        name: tf.RaggedTensor.from_row_lengths(
            tf.range(size, dtype=tf.int64), tf.ones([size], tf.int64)
        )
        for name, size in {"word": 19, "user": 9, "item": 9, "one": 1}.items()
    }
    before = served.model.serve(features)
    assert served.apply(str(folder / "deltas")) == 2
    after = served.model.serve(features)
    one = restored(folder / "after_delta")
    tlm.export(one, str(tmp_path / "wanted"), row_format=rows)
    loaded = tf.saved_model.load(str(tmp_path / "wanted"))
    wanted = loaded.serve(features)
    for name in features:
        np.testing.assert_array_equal(after[name], wanted[name])
    assert (before["word"].numpy() != after["word"].numpy()).any()
    tlm.deltas.update_export(
        str(folder / rows), str(folder / "deltas"), str(tmp_path / "updated")
    )
    loaded = tf.saved_model.load(str(tmp_path / "updated"))
    updated = loaded.serve(features)
    for name in features:
        np.testing.assert_array_equal(updated[name], wanted[name])


def test_asynchronous_checkpoints_contain_the_steps_before_them(folder):
    for number in (3, 5, 7):
        one = trained_here(folder, number + 1)
        wanted = cases.tensors(cases.save(one, folder / f"wanted_{number}"))
        assert cases.tensors(str(folder / f"async_{number}")) == wanted
    one = trained_here(folder, 9)
    wanted = cases.tensors(cases.save(one, folder / "wanted_end"))
    assert cases.tensors(str(folder / "end")) == wanted


def test_errors_are_raised_in_all_processes(folder):
    for worker in workers_of(folder):
        found = json.loads((folder / f"errors_{worker}.json").read_text())
        assert "is outside table words with 19 rows" in found["bad id"]
        assert "Process 1: id 19" in found["bad id"]
        assert (
            "ValueError: Table 'words' cannot be stored"
            in (found["not finite"])
        )
        assert "must be a folder that is new" in found["blocked"]
        assert "outside of tf.function" in found["in a function"]
        assert "NotImplementedError: Table 'words'" in found["implicit"]
        assert "`sparse_read` in all processes" in found["implicit"]
    assert not (folder / "nan").exists()

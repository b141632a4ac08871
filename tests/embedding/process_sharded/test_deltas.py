"""Deltas that several processes write together."""

import shutil

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import processes
from tests.deltas import cases
from tests.embedding.process_sharded import deltas_program as program
from tf_layoutmap.deltas.served import chain

# Starting the processes takes most of the time of a test.
DEADLINE_SECONDS = 180
NUM_DELTAS = 4


def run(folder, how, count=2):
    folder.mkdir(exist_ok=True)
    return processes.run_in_folder(
        folder, program, how, seconds=DEADLINE_SECONDS, count=count
    )


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Folder of two processes with sharded tables."""
    return run(tmp_path_factory.mktemp("sharded"), "sharded")


def deltas_in(folder):
    return chain.read_deltas(str(folder / "deltas"), str(folder / "base"))


@pytest.mark.slow
def test_a_failed_part_raises_in_all_processes(sharded):
    own, other = (
        (sharded / f"error_{worker}.txt").read_text() for worker in (1, 0)
    )
    assert own == "[Errno 28] disk full"
    assert "DeltaWriter.write failed in process 1: OSError:" in other
    assert "disk full" in other
    # The failed write leaves no staging folder.
    assert sorted(path.name for path in (sharded / "deltas").iterdir()) == [
        f"{number:08d}" for number in range(1, NUM_DELTAS + 1)
    ]


@pytest.mark.slow
def test_merged_parts_equal_the_deltas(sharded, tmp_path):
    merged = tmp_path / "merged"
    merged.mkdir()
    tlm.deltas.merge(
        [one.path for one in deltas_in(sharded)],
        merged / chain.directory_name(NUM_DELTAS, 1),
    )
    full = tlm.deltas.apply(sharded / "base", merged, tmp_path / "full")
    assert cases.tensors(full) == cases.tensors(str(sharded / "end"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda part, other: part.unlink(), "must have the file"),
        (lambda part, other: shutil.copy(other, part), "must have"),
        (
            lambda part, other: part.write_bytes(
                np.frombuffer(part.read_bytes(), np.uint8)[::-1].tobytes()
            ),
            "another checksum; the file was modified",
        ),
    ],
    ids=["missing", "of_another_delta", "modified"],
)
def test_a_missing_or_foreign_part_raises(sharded, tmp_path, change, words):
    copy = tmp_path / "deltas"
    shutil.copytree(sharded / "deltas", copy)
    name = "delta.data-00001-of-00002"
    change(copy / "00000001" / name, copy / "00000002" / name)
    for call in (
        lambda: tlm.deltas.apply(sharded / "base", copy, tmp_path / "full"),
        lambda: tlm.deltas.merge([copy / "00000001"], tmp_path / "merged"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_the_first_process_writes_the_weights(sharded, tmp_path):
    base = sharded / "base_of_model"
    (delta,) = chain.read_deltas(str(sharded / "weights"), str(base))
    changed = [
        label for label, one in delta.meta.weights.items() if one["is_changed"]
    ]
    assert sorted(changed) == ["model/kernel", "model/mean"]
    full = tlm.deltas.apply(base, sharded / "weights", tmp_path / "full")
    found = cases.tensors(full)
    assert found == cases.tensors(str(sharded / "end_of_model"))
    reader = tf.train.load_checkpoint(full)
    key = "model/{}/.ATTRIBUTES/VARIABLE_VALUE".format
    assert reader.get_tensor(key("kernel")).tolist() == [2.0, 2.0]
    assert reader.get_tensor(key("mean")) == 0.5

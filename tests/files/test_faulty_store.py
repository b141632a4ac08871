"""A writer on a file system without atomic operations is killed anywhere.

The file system `faulty://` copies instead of renaming, shows files while they
are written, and lists names late. Each write operation of a writer fails in
turn, in TensorFlow's own operations too: either this operation only, or also
all later ones, as if the writer was killed. A reader then sees the old state or
the new state.
"""

import contextlib
import dataclasses
import hashlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.deltas.served import cases
from tests.files import faulty_store
from tf_layoutmap._core import files
from tf_layoutmap.deltas import delta_files
from tf_layoutmap.deltas.served import chain, export_state, packing, storage
from tf_layoutmap.ps import checkpoints, folder_locks
from tf_layoutmap.serving import export
from tf_layoutmap.vocabulary import checkpoint_files, key_rows, row_files

# Bazel builds the file system.
pytestmark = pytest.mark.slow

FOLDER = "faulty://bucket/folder"


@pytest.fixture
def store():
    found = faulty_store.load()
    found.reset()
    yield found
    found.reset()


@dataclasses.dataclass(frozen=True)
class Case:
    """A writer and a reader of a path.

    Attributes:
      prepare: Writes the old state.
      write: Writes the new state.
      read: Returns the state that a reader sees. None if the reader raises an
        error because the folder is not complete.
      has_gap: Whether readers raise an error while the new state replaces the
        old state.
    """

    prepare: Callable[[], object]
    write: Callable[[], object]
    read: Callable[[], Any]
    has_gap: bool = False


def text_case():
    return Case(
        lambda: files.write_text(f"{FOLDER}/report", "old " * 9),
        lambda: files.write_text(f"{FOLDER}/report", "new"),
        lambda: storage.read_text(f"{FOLDER}/report"),
    )


def read_checkpoint(prefix):
    reader = storage.open_checkpoint(prefix)
    return {
        key: np.asarray(reader.get_tensor(key)).tolist()
        for key in reader.get_variable_to_shape_map()
    }


def checkpoint_case():
    def write(value):
        tensors = [(name, np.full([3], value)) for name in "abc"]
        checkpoint_files.write_checkpoint(f"{FOLDER}/ck", tensors)

    return Case(
        lambda: write(1),
        lambda: write(2),
        lambda: read_checkpoint(f"{FOLDER}/ck"),
    )


META = chain.Meta(0, "base", "prefix", "", {}, {})


def write_delta(sequence, directory=f"{FOLDER}/deltas"):
    before = (
        chain.read_chain(chain.pending_paths(directory, 0), "", "", 0)
        if sequence > 1
        else []
    )
    delta_files.write_files(
        f"{directory}/{chain.directory_name(sequence)}",
        {"words/rows": np.arange(sequence), "words/values": np.ones([3, 4])},
        lambda of_files: dataclasses.replace(
            META,
            sequence=sequence,
            previous=before[-1].meta.link if before else "",
            files=of_files,
        ),
    )


def read_deltas():
    """Returns the numbers of all deltas, whose files are verified."""
    found = chain.read_chain(
        chain.pending_paths(f"{FOLDER}/deltas", 0), "", "", 0
    )
    return [(one.meta.sequence, read_checkpoint(one.tensors)) for one in found]


def delta_case():
    return Case(lambda: write_delta(1), lambda: write_delta(2), read_deltas)


def key_blocks(value):
    for first in (0, 10):
        yield key_rows.KeyBlock(
            keys=np.arange(first, first + 10),
            rows=np.full([10, 2], value, np.float32),
            slots={},
            counts=np.ones([10], np.int64),
            last_steps=np.ones([10], np.int64),
            step=1,
            key_type="integers",
        )


def rows_case():
    def write(value):
        info = row_files.FolderInfo("words", 2, {}, "integers")
        row_files.write_folder(
            f"{FOLDER}/rows", key_blocks(value), "numpy", info
        )

    def read():
        blocks = list(row_files.read_folder(f"{FOLDER}/rows"))
        assert len(blocks) == 2
        return [one.rows.tolist() for one in blocks]

    return Case(lambda: write(1), lambda: write(2), read)


def run_case():
    def write(number):
        # The programs of the old and the new checkpoint differ.
        folder_locks._locks.clear()
        opened = checkpoints.CheckpointFolder(f"{FOLDER}/run", 1)
        value = tf.Variable(tf.fill([3], float(number)))
        opened.save(number, tf.train.Checkpoint(value=value).write)

    def read():
        folder_locks._locks.clear()
        with contextlib.ExitStack() as stack:
            # A reader writes no file.
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(
                folder_locks, "lock", lambda folder: None
            )
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(
                checkpoints.CheckpointFolder,
                "_remove_unfinished",
                lambda self: None,
            )
            opened = checkpoints.CheckpointFolder(f"{FOLDER}/run", 1)
        newest = opened.newest()
        value = tf.Variable(tf.zeros([3]))
        status = tf.train.Checkpoint(value=value).read(newest.prefix)
        status.assert_existing_objects_matched()
        return newest.num_done, value.numpy().tolist()

    return Case(lambda: write(1), lambda: write(2), read)


CASES = {
    "text": text_case,
    "checkpoint": checkpoint_case,
    "delta": delta_case,
    "rows": rows_case,
    "run": run_case,
}


def states_of(store, case):
    """Returns the old state, the new state, and the number of operations.

    Afterwards, the saved files are the old state.
    """
    case.prepare()
    store.save()
    old = case.read()
    before = store.num_writes
    case.write()
    return old, case.read(), store.num_writes - before


def fail_in_turn(store, case, *, once=False, delay=0, every=1):
    """Lets each operation of a writer fail, and compares what readers see."""
    old, new, count = states_of(store, case)
    assert old != new
    store.set_delay(delay)
    found = []
    for number in range(0, count, every):
        store.restore()
        store.fail_at(number, once=once)
        failed = False
        try:
            case.write()
        except (OSError, RuntimeError, tf.errors.OpError):
            failed = True
        store.fail_at(-1)
        seen = case.read()
        assert seen in (old, new) or (case.has_gap and seen is None), number
        if not failed:
            # An operation after the state has changed does not matter.
            assert seen == new
        found.append((failed, seen))
        # The next writer succeeds.
        if failed:
            case.write()
            assert case.read() == new, number
    return old, new, found


@pytest.mark.parametrize("delay", [0, 7])
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.covering(2)
def test_readers_see_the_old_or_the_new_state(store, name, once, delay):
    old, new, found = fail_in_turn(store, CASES[name](), once=once, delay=delay)
    seen = [one for _, one in found]
    # The new state appears once and remains.
    first = seen.index(new) if new in seen else len(seen)
    assert first > 3
    if not once:
        assert seen == [old] * first + [new] * (len(seen) - first)


@pytest.mark.parametrize("name", ["delta", "rows"])
def test_half_of_the_last_file_raises(store, name):
    """Covers a file system that does not even copy one file completely."""
    case = CASES[name]()
    old, new, count = states_of(store, case)
    errors = 0
    for number in range(count):
        store.restore()
        store.fail_at(number, halves=True)
        with contextlib.suppress(OSError):
            case.write()
        store.fail_at(-1)
        try:
            assert case.read() in (old, new)
        except ValueError as error:
            assert "truncated or modified" in str(error) or "_meta" in str(
                error
            )
            errors += 1
    assert errors == 1


def read_model(path):
    """Returns the checksums of a complete SavedModel, or None."""
    if not tf.saved_model.contains_saved_model(path):
        return None
    values = cases.stored(path)
    digest = hashlib.sha256()
    digest.update(bytes([storage.is_file(f"{path}/fingerprint.pb")]))
    for key in sorted(values):
        if not key.startswith("_CHECKPOINTABLE"):
            digest.update(values[key])
    return digest.hexdigest()


@pytest.fixture
def write_model(tmp_path, monkeypatch):
    """Returns a function that writes a SavedModel with a table of two blocks.

    TensorFlow writes its part of each of the two SavedModels once.
    """
    modules = {}
    for value in (1.0, 2.0):
        module = modules[value] = tf.Module()
        module.other = tf.Variable(tf.fill([3], value))
        module.table = export.StoredVariable(
            "tables_0", 4, packing.RowFormat("float32", 2)
        )
        module.folder = str(tmp_path / str(value))
        tf.saved_model.save(module, module.folder)
    monkeypatch.setattr(
        tf.saved_model,
        "save",
        lambda module, folder, signatures: shutil.copytree(
            module.folder, folder, dirs_exist_ok=True
        ),
    )

    def write(value):
        block = np.full([2, 2], value, np.float32)
        with export.remote_saved_model(
            modules[value],
            None,
            f"{FOLDER}/model",
            [(modules[value].table, lambda: iter([block, block]))],
        ):
            pass

    return write


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("delay", [0, 7])
@pytest.mark.covering(1)
def test_a_saved_model_is_complete_or_rejected(store, write_model, once, delay):
    case = Case(
        lambda: write_model(1.0),
        lambda: write_model(2.0),
        lambda: read_model(f"{FOLDER}/model"),
        has_gap=True,
    )
    old, new, found = fail_in_turn(store, case, once=once, delay=delay)
    seen = [state for _, state in found]
    assert seen[0] == old and None in seen
    tf.saved_model.load(f"{FOLDER}/model")
    if not once:
        # Readers raise an error from the first removed file to the last file.
        assert seen == sorted(seen, key=[old, None, new].index)


@pytest.mark.exhaustive
def test_an_export_is_complete_or_rejected(store):
    one = cases.embedding()

    def write(value):
        one._variables["colors"]["parameters"].assign(tf.fill([5, 3], value))
        cases.export(one, f"{FOLDER}/model")

    case = Case(
        lambda: write(1.0),
        lambda: write(2.0),
        lambda: read_model(f"{FOLDER}/model"),
        has_gap=True,
    )
    _, _, found = fail_in_turn(store, case)
    assert found[0][1] is not None and None in [state for _, state in found]


def test_an_update_is_complete_or_rejected(store):
    one = cases.embedding()
    base = cases.save(one, f"{FOLDER}/base")
    writer = tlm.deltas.DeltaWriter(one, f"{FOLDER}/deltas", base=base)
    cases.export(one, f"{FOLDER}/1", delta_writer=writer)
    cases.train(one, 0)
    writer.write()
    store.save()
    before = store.num_writes
    tlm.deltas.update_export(f"{FOLDER}/1", f"{FOLDER}/deltas", f"{FOLDER}/2")
    count = store.num_writes - before
    expected = cases.stored(f"{FOLDER}/2")
    complete = 0
    for number in range(count):
        store.restore()
        store.fail_at(number)
        with contextlib.suppress(OSError):
            tlm.deltas.update_export(
                f"{FOLDER}/1", f"{FOLDER}/deltas", f"{FOLDER}/2"
            )
        store.fail_at(-1)
        if storage.is_file(f"{FOLDER}/2/{export_state.MODEL}"):
            assert cases.stored(f"{FOLDER}/2") == expected
            assert export_state.read(f"{FOLDER}/2").sequence == 1
            complete += 1
        else:
            with pytest.raises(ValueError, match="SavedModel"):
                export_state.read(f"{FOLDER}/2")
            # The next call replaces the incomplete folder.
            tlm.deltas.update_export(
                f"{FOLDER}/1", f"{FOLDER}/deltas", f"{FOLDER}/2"
            )
            assert cases.stored(f"{FOLDER}/2") == expected
    assert 0 < complete < count


@pytest.mark.parametrize("once", [False, True])
def test_merged_deltas_replace_deltas(store, once):
    """All changes remain whenever `tlm.deltas.prune` ends."""
    one = cases.embedding()
    base = cases.save(one, f"{FOLDER}/base")
    writer = tlm.deltas.DeltaWriter(one, f"{FOLDER}/deltas", base=base)
    for step in range(3):
        cases.train(one, step)
        writer.write()
    store.save()

    def applied():
        chosen = chain.read_deltas(f"{FOLDER}/deltas", base)
        assert chain.last_sequence(chosen) == 3
        full = tlm.deltas.apply(base, f"{FOLDER}/deltas", f"{FOLDER}/full")
        return read_checkpoint(full)

    expected = applied()
    store.restore()
    before = store.num_writes
    tlm.deltas.prune(f"{FOLDER}/deltas", keep=1)
    count = store.num_writes - before
    assert applied() == expected
    for number in range(count):
        store.restore()
        store.fail_at(number, once=once)
        with contextlib.suppress(OSError):
            tlm.deltas.prune(f"{FOLDER}/deltas", keep=1)
        store.fail_at(-1)
        chain.read_deltas(f"{FOLDER}/deltas", base)
        # A served model can also continue after its last delta.
        chain.read_chain(
            chain.pending_paths(f"{FOLDER}/deltas", 1),
            "",
            "",
            1,
            writer.deltas[0].meta.link,
        )
        remaining = tlm.deltas.prune(f"{FOLDER}/deltas", keep=1)
        assert [one.meta.first for one in remaining] == [1, 3]
    assert applied() == expected


def test_a_writer_continues_after_a_failed_write(store):
    one = cases.embedding()
    base = cases.save(one, f"{FOLDER}/base")
    writer = tlm.deltas.DeltaWriter(one, f"{FOLDER}/deltas", base=base)
    model = cases.export(one, f"{FOLDER}/model", delta_writer=writer)
    served = tlm.deltas.ServedModel(model)
    failures = 0
    for number in range(0, 20, 2):
        cases.train(one, number)
        store.fail_at(number, once=True)
        try:
            writer.write()
        except OSError:
            failures += 1
            writer.write()
        store.fail_at(-1)
        assert served.apply(f"{FOLDER}/deltas") == len(writer.deltas)
    assert failures > 3
    cases.assert_same_tables(
        cases.in_memory(served.model),
        cases.stored(cases.export(one, f"{FOLDER}/fresh")),
    )


def test_deltas_are_found_if_a_list_of_names_is_late(store, monkeypatch):
    for number in (1, 2, 3):
        write_delta(number)
    for names in ([], ["00000003"], ["00000001"], ["00000002", "00000004"]):
        monkeypatch.setattr(storage, "names_in", lambda path: names)
        assert [number for number, _ in read_deltas()] == [1, 2, 3]

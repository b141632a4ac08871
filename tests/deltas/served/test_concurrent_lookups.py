"""Tests lookups that run while deltas are applied."""

import contextlib
import threading

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests.deltas.served import cases
from tf_layoutmap.deltas.served import served_model
from tf_layoutmap.deltas.served.export_state import EMPTY_KEY
from tf_layoutmap.deltas.served.lookup_lock import LookupLock


def is_row_of(found, *wanted):
    """Returns whether each row is equal to the row of one of the arrays."""
    return np.any([np.all(found == one, axis=1) for one in wanted], axis=0)


@pytest.mark.parametrize("oov_embedding", ["zeros", "trainable"])
@pytest.mark.parametrize("atomic", [True, False])
def test_each_key_has_its_old_or_its_new_row(
    oov_embedding, atomic, tmp_path, monkeypatch
):
    """Looks up all keys after every single write."""
    # Keys that occur for the first time train the row of unknown keys.
    settings = {"admission": "count", "min_count": 2}
    one = cases.embedding(oov_embedding=oov_embedding, settings=settings)
    for step in range(8):
        cases.train(one, step)
    # An export with free rows, which keys get without replacing others.
    one.vocabularies["words"].evict(one.vocabularies["words"].keys()[::9])
    _, writer = cases.base_and_writer(one, tmp_path)
    path = cases.export(one, tmp_path / "old", delta_writer=writer)
    vocabulary = one.vocabularies["words"]
    old_keys = vocabulary.keys()
    for step in (*range(8, 30), *range(8)):
        cases.train(one, step)
    vocabulary.evict(old_keys[::3])
    cases.train(one, 40)
    # Some rows have no key afterwards.
    vocabulary.evict(vocabulary.keys()[::7])
    writer.write()
    cases.export(one, tmp_path / "new")
    batch = cases.inputs()
    models = [tf.saved_model.load(str(tmp_path / x)) for x in ("old", "new")]
    old, new = (model.serve(batch)["word"].numpy() for model in models)
    places = [
        {
            key: place
            for place, key in enumerate(model.keys[0].numpy().ravel())
            if key != EMPTY_KEY
        }
        for model in models
    ]
    # No table has had the key 399.
    of_unknown = old[-1:], new[-1:]
    assert np.array_equal(*of_unknown) == (oov_embedding == "zeros")
    moved = [
        key
        for key in places[0]
        if places[1].get(key, places[0][key]) != places[0][key]
    ]
    assert len(moved) > 3
    evicted = [key for key in places[0] if key not in places[1]]
    assert len(evicted) > 3

    served = tlm.deltas.ServedModel(path)
    monkeypatch.setattr(served_model, "_FEWEST_ROWS", 4)
    monkeypatch.setattr(served_model, "_MOST_ROWS", 4)
    served._rows_per_write = 4
    write, exclusive = served_model._scatter_nd, served._lock.exclusive
    counts = {"writes": 0, "blocks": 0, "mixed": 0}

    def look_up():
        return served.model.serve(batch)["word"].numpy()

    def write_and_look_up(*arguments):
        write(*arguments)
        counts["writes"] += 1
        # Without the lock, a key may be unknown, but has no foreign row.
        assert is_row_of(look_up(), old, new, *of_unknown).all()

    @contextlib.contextmanager
    def exclusive_and_look_up():
        with exclusive():
            yield
        counts["blocks"] += 1
        with served.lookups():
            found = look_up()
        assert is_row_of(found, old, new).all()
        counts["mixed"] += not (
            np.array_equal(found, old) or np.array_equal(found, new)
        )

    monkeypatch.setattr(served_model, "_scatter_nd", write_and_look_up)
    monkeypatch.setattr(served._lock, "exclusive", exclusive_and_look_up)
    served.apply(tmp_path / "deltas", atomic=atomic)
    assert counts["writes"] > 20
    if atomic:
        assert (counts["blocks"], counts["mixed"]) == (1, 0)
    else:
        assert counts["blocks"] > 5 and counts["mixed"] > 5
    np.testing.assert_array_equal(look_up(), new)


def test_a_lookup_never_returns_a_mixture_of_two_values():
    """One thread writes rows of equal numbers while two threads read them."""
    num_rows, dim = 4096, 256
    variable = tf.Variable(tf.zeros([num_rows, dim]))
    rows = np.arange(num_rows)
    is_done = threading.Event()
    mixtures, seen = [], set()

    def read():
        while not is_done.is_set():
            found = tf.gather(variable, rows).numpy()
            if not np.array_equal(found, np.repeat(found[:, :1], dim, 1)):
                mixtures.append(found)
            seen.add(float(found[0, 0]))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for one in readers:
        one.start()
    try:
        for value in range(1, 60):
            served_model._scatter(
                variable, rows, np.full([num_rows, dim], value, np.float32)
            )
    finally:
        is_done.set()
        for one in readers:
            one.join()
    assert not mixtures
    assert len(seen) > 1


def test_readers_run_between_two_writes():
    """A writer that writes again at once lets waiting readers run first."""
    lock, order = LookupLock(), []
    is_waiting = threading.Event()

    def read():
        is_waiting.set()
        with lock.shared():
            order.append("read")

    reader = threading.Thread(target=read)
    with lock.exclusive():
        reader.start()
        is_waiting.wait()
        while not lock._num_waiting:
            pass
        order.append("first write")
    with lock.exclusive():
        order.append("second write")
    reader.join()
    assert order == ["first write", "read", "second write"]


def test_a_write_waits_for_readers_and_excludes_them():
    lock, order = LookupLock(), []
    started = threading.Event()

    def write():
        started.set()
        with lock.exclusive():
            order.append("write")

    writer = threading.Thread(target=write)
    with lock.shared():
        writer.start()
        started.wait()
        while not lock._is_writing:
            pass
        # A nested block of the same thread does not wait for the writer.
        with lock.shared():
            order.append("read")
    writer.join()
    assert order == ["read", "write"]


def test_an_error_in_a_block_releases_the_lock():
    lock = LookupLock()
    for block in (lock.shared, lock.exclusive):
        with pytest.raises(KeyError), block():
            raise KeyError
    with lock.exclusive():
        pass


KEYS = st.lists(st.integers(0, 12), min_size=12, max_size=12, unique=True)


@given(KEYS, KEYS, st.integers(1, 5))
def test_groups_contain_both_rows_of_a_moving_key(before, after, num_rows):
    # Key 0 represents an empty place, which can occur several times.
    before, after = (
        np.where(np.array(one) < 3, EMPTY_KEY, one) for one in (before, after)
    )
    changed = before != after
    before, after = before[changed], after[changed]
    groups = [
        one.tolist()
        for one in served_model._groups(
            served_model._labels(before, after), lambda: num_rows
        )
    ]
    assert sorted(sum(groups, [])) == list(range(len(before)))
    group_of = {row: n for n, rows in enumerate(groups) for row in rows}
    rows_of = {key: row for row, key in enumerate(before.tolist())}
    for row, key in enumerate(after.tolist()):
        if key != EMPTY_KEY and key in rows_of:
            assert group_of[rows_of[key]] == group_of[row]
    # Groups are not larger than necessary: without its last connected rows, a
    # group has fewer rows than wanted.
    labels = served_model._labels(before, after)
    for rows in groups:
        last = labels[rows[-1]]
        assert sum(labels[row] != last for row in rows) < num_rows


class SlowClock:
    """A clock on which each call of `perf_counter` takes a millisecond."""

    def __init__(self):
        self.seconds = 0.0
        self.pauses = []

    def perf_counter(self) -> float:
        self.seconds += 0.001
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


@pytest.mark.parametrize("atomic", [True, False])
def test_long_writes_become_smaller_and_lookups_run_between_them(
    atomic, tmp_path, monkeypatch
):
    embedding = cases.embedding()
    cases.train(embedding, 0)
    _, writer = cases.base_and_writer(embedding, tmp_path)
    path = cases.export(embedding, tmp_path / "old", delta_writer=writer)
    for step in range(1, 20):
        cases.train(embedding, step)
    writer.write()
    served = tlm.deltas.ServedModel(path)
    clock = SlowClock()
    monkeypatch.setattr(served_model, "time", clock)
    served.apply(tmp_path / "deltas", atomic=atomic)
    assert served._rows_per_write == served_model._FEWEST_ROWS
    # A write on a busy machine is not followed by a long pause.
    assert set(clock.pauses) == (set() if atomic else {0.00014})
    assert atomic or len(clock.pauses) > 3
    cases.export(embedding, tmp_path / "new")
    cases.assert_same_tables(
        cases.in_memory(served.model), cases.stored(tmp_path / "new")
    )

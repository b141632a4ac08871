"""Warnings point at the user's line, and DTensor's notes are hidden."""

import functools
import io
import json
import sys
import threading
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layout.meshes import mesh_of
from tf_layoutmap._core import ops, user_warnings
from tf_layoutmap.serving.report import ExportReport, TableReport


def test_a_warning_skips_frames_of_libraries():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # `json` and `functools` belong to the standard library.
        json.loads(
            "[1]", object_hook=None, parse_int=functools.partial(warn_inside)
        )
    assert caught[0].filename == __file__
    assert "deep inside" in str(caught[0].message)


def test_printed_tables_are_ascii_if_the_standard_output_is(monkeypatch):
    report = ExportReport(
        "/served",
        (TableReport("words", 8, 2, "int8", 16, 64, 0.1, 0.05),),
        num_variables=1,
        num_bytes=100,
    )
    table = tlm.ShardedVariable([tf.Variable([[1.0]]), tf.Variable([[2.0]])])
    explanation = tlm.LayoutMap(mesh=mesh_of(batch=1)).explain(
        keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    )
    for shown in (report, table.summary(), explanation):
        monkeypatch.setattr(
            sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        )
        print(shown)
        assert "|" in str(shown)
        monkeypatch.undo()
        assert not str(shown).isascii()


def warn_inside(text):
    user_warnings.warn("deep inside")
    return int(text)


def fit_and_predict():
    layout_map = tlm.LayoutMap(mesh=mesh_of(batch=1, model=2))
    layout_map["no_such_layer"] = ("model",)
    with tlm.layout_map_scope(layout_map):
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.fit(np.ones([4, 4]), np.ones([4, 2]), verbose=0)
    model.predict(np.ones([4, 4]), verbose=0)


def test_a_warning_of_fit_names_this_file_and_is_short():
    with pytest.warns(tlm.layout.LayoutMapWarning) as caught:
        fit_and_predict()
    [found] = [one for one in caught if "without effect" in str(one.message)]
    assert found.filename == __file__


@pytest.fixture
def all_logs(monkeypatch):
    """Lets TensorFlow log messages of all levels."""
    for name in ops._LOG_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    logs = ops._info_logs
    if not logs._is_found:
        pytest.skip(
            "TensorFlow 2.20 does not export the level of its messages."
        )
    before = logs._get()
    logs._set(0)
    yield logs
    logs._set(before)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("level", [None, "0"])
def test_notes_of_the_compiler_are_hidden_unless_levels_are_set(
    all_logs, level, monkeypatch, capfd
):
    if level is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    fit_and_predict()
    notes = capfd.readouterr().err.count("cache key lookup missed")
    assert notes == 0 if level is None else notes > 0
    assert all_logs._get() == 0


def test_the_level_is_restored_after_overlapping_contexts(all_logs):
    first, second = threading.Event(), threading.Event()

    def other():
        with ops.hide_info_logs():
            first.set()
            second.wait(10)

    thread = threading.Thread(target=other)
    with ops.hide_info_logs():
        thread.start()
        first.wait(10)
        assert all_logs._get() == 1
    # The other thread still hides messages.
    assert all_logs._get() == 1
    second.set()
    thread.join()
    assert all_logs._get() == 0

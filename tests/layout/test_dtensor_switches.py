"""Checks that DTensor's unsafe passes are detected when they are enabled."""

import os
import textwrap

import pytest

import tf_layoutmap as tlm
from tests import forked_process
from tests.layout.meshes import mesh_of
from tf_layoutmap.layout import dtensor_switches

PASS, GROUP_SIZE, ALL_TO_ALL = dtensor_switches.SAFE

PROGRAM = """
    import os
    import tests.strategies
    import tensorflow as tf
    dtensor = tf.experimental.dtensor
    mesh = dtensor.create_mesh(
        [("batch", 4)], devices=["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    {before}
    import tf_layoutmap as tlm
    {after}
    for check in (lambda: tlm.layout.self_check(mesh),
                  tlm.layout_map_scope(tlm.LayoutMap(mesh)).__enter__):
        try:
            check()
            print("passed")
        except RuntimeError as error:
            print("refused:", error)
"""
COMPILE = (
    "with dtensor.default_mesh(mesh): "
    "tf.function(lambda: tf.reduce_sum(tf.ones([4])))()"
)

MOVE = """
first, second = (dtensor.Layout(
    ["batch" if d == dim else dtensor.UNSHARDED for d in range(4)], mesh)
    for dim in (1, 2))
replicated = dtensor.copy_to_mesh(
    tf.ones([1, 4, 4, 2]), dtensor.Layout.replicated(mesh, 4))
dtensor.relayout(dtensor.relayout(replicated, first), second)
"""


def run(before="", after="", **environment):
    clean = {
        k: v for k, v in os.environ.items() if k not in dtensor_switches.SAFE
    }
    done = forked_process.run_code(
        textwrap.dedent(PROGRAM).format(before=before, after=after),
        env={**clean, **environment},
    )
    return [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("passed", "refused"))
    ]


def test_safe_process_is_accepted():
    found = dtensor_switches.self_check(mesh_of(batch=2, model=2))
    assert found.startswith("ok: 4 of")
    assert tlm.layout.self_check().startswith("ok")
    assert "one device" in dtensor_switches.self_check(mesh_of(batch=1))


@pytest.mark.slow
def test_process_that_compiled_first_fails_the_trial():
    check, scope = run(before=COMPILE, after=f"os.environ.pop({GROUP_SIZE!r})")
    assert "3 of 4 reads returned the value before the write" in check
    assert "Import tf_layoutmap before anything runs on DTensor" in check
    assert scope.startswith("refused")


@pytest.mark.slow
def test_process_that_moved_an_axis_first_fails_the_trial():
    check, scope = run(before=MOVE)
    assert "a relayout moved elements to wrong positions" in check
    assert f"{ALL_TO_ALL}=0" in check
    assert scope.startswith("refused")


@pytest.mark.slow
def test_environment_variable_that_enables_the_pass_raises():
    check, scope = run(**{PASS: "1", GROUP_SIZE: "64"})
    assert "before the write" in check
    assert f"{PASS} must be '0'" in scope and "Received: '1'" in scope


@pytest.mark.parametrize("name", dtensor_switches.SAFE)
def test_changed_environment_variable_raises_at_the_scope(monkeypatch, name):
    monkeypatch.setenv(name, "7")
    with pytest.raises(RuntimeError, match=f"{name} must be"):
        with tlm.layout_map_scope(tlm.LayoutMap(mesh_of(batch=2))):
            pass

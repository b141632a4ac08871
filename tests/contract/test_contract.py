"""Each feature on each runtime is in its declared state.

The exhaustive cases try all features. `make test` tries one feature of each
kind on each runtime.
"""

import collections
import re

import pytest
import tensorflow as tf

from tests import processes
from tests.contract import page, programs, trial
from tests.contract.declared import SECTIONS
from tests.contract.states import RUNTIMES, NotTried, Raises, State, Works

# Features that `make test` tries on all runtimes.
FEW = {
    "loop": (
        "closed table",
        "open vocabulary",
        "`tlm.export`",
        "asynchronous checkpoint, open vocabulary",
        "gradients that each process sums first",
    ),
    "v2": (
        "closed table",
        "several updates in a step",
        "asynchronous checkpoint",
        "`tlm.export`",
    ),
    "sharded": ("`fit`, open vocabulary",),
    "tpu": ("`fit`, open vocabulary",),
    "tf_keras tpu": ("`fit`, closed table",),
}
# Seeds of the random programs that `make test` runs, by family.
SEEDS = {"steps": (1,), "replicas": (2,)}
# Sections that only exhaustive cases try on these runtimes: random programs,
# models of tf_keras and `TPUEmbeddingV2`. They take long in several processes.
# With tables on the host, an emulated TPU runs the same steps as a
# MirroredStrategy.
NOT_IN_FEW = {
    (runtime, section)
    for runtime in ("replicated", "sharded", "tpu_host")
    for section in ("random steps", "random replicas", "tf_keras tpu", "v2")
}
# Seeds of the exhaustive cases.
MORE_SEEDS = {"steps": range(20), "replicas": range(20)}


def few(group):
    """Returns the cells of a group that `make test` tries."""
    runtimes = trial.GROUPS[group]
    return [
        cell
        for cell in trial.random_cells(runtimes, SEEDS)
        if cell[:2] not in NOT_IN_FEW
    ] + [
        cell
        for cell in trial.cells(runtimes, list(FEW))
        if cell[2] in FEW[cell[1]] and cell[:2] not in NOT_IN_FEW
    ]


def many(group):
    """Returns all cells of a group."""
    runtimes = trial.GROUPS[group]
    return trial.random_cells(runtimes, MORE_SEEDS) + trial.cells(
        runtimes, list(SECTIONS)
    )


@pytest.fixture(scope="module")
def tried(request, tmp_path_factory):
    """Runs the cells of all selected tests with one start of each group."""
    one = trial.Trial(tmp_path_factory.mktemp("contract"))
    one.run(
        cell
        for argument, cells_of in (("group", few), ("full_group", many))
        for group in trial.GROUPS
        if group in processes.selected(request, argument)
        for cell in cells_of(group)
    )
    return one


def groups():
    """Returns the parameters of the tests that run the programs of a group."""
    is_old = tf.__version__ < "2.21"
    return [
        pytest.param(
            group,
            marks=pytest.mark.skipif(
                is_old and group == "sparse_cores",
                reason="TPUEmbeddingV2 of TensorFlow 2.20 supports only one "
                "feature",
            ),
        )
        for group in trial.GROUPS
    ]


@pytest.mark.slow
@pytest.mark.covering(None)
@pytest.mark.parametrize("group", groups())
def test_some_features_are_in_their_declared_state(group, tried):
    assert not tried.problems(few(group))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("full_group", groups())
def test_all_features_are_in_their_declared_state(full_group, tried):
    assert not tried.problems(many(full_group))


def test_the_page_shows_the_declared_states():
    _, generated = page.read()
    assert generated == page.text(), "run `python -m tests.contract --page`"


def test_each_feature_has_a_program():
    assert {name: list(one.rows) for name, one in SECTIONS.items()} == {
        name: [
            feature
            for feature in SECTIONS[name].rows
            if feature in programs.SECTIONS[name]
        ]
        for name in programs.SECTIONS
    }
    missing = [
        (name, feature)
        for name, found in programs.SECTIONS.items()
        for feature in found
        if feature not in SECTIONS[name].rows
    ]
    assert not missing


def test_reasons_are_sentences():
    states: list[State] = [
        state
        for section in SECTIONS.values()
        for cells in section.rows.values()
        for state in cells.values()
        if not isinstance(state, Works)
    ]
    assert states
    for state in states:
        assert isinstance(state, Raises | NotTried)
        assert re.fullmatch(r"[A-Z`].*\.", state.reason), state.reason
        if isinstance(state, Raises):
            re.compile(state.error)
            assert len(state.error) > 15, state.error


def outcome(tmp_path, name, error=None, **numbers):
    import numpy as np

    if error is not None:
        return trial.Outcome(error)
    path = tmp_path / f"{name}.npz"
    np.savez(path, **numbers)
    return trial.Outcome(None, str(path))


def test_each_deviation_is_reported(tmp_path):
    host = ("host", "loop", "closed table")
    other = ("mirrored", "loop", "closed table")

    def problem(found, wanted):
        return trial._problem(other, {host: wanted, other: found})

    one = outcome(tmp_path, "one", rows=[1.0, 2.0])
    equal = outcome(tmp_path, "equal", rows=[1.0, 2.0])
    gap = outcome(tmp_path, "gap", rows=[1.0, 2.5])
    renamed = outcome(tmp_path, "renamed", row=[1.0, 2.0])
    empty = outcome(tmp_path, "empty")
    failed = outcome(tmp_path, "", "ValueError: no")
    assert problem(one, equal) is None
    assert "differs from the host by 0.5" in problem(gap, one)
    assert "must return the numbers" in problem(renamed, one)
    assert "must return numbers" in problem(empty, empty)
    assert "must work. Received: ValueError: no" in problem(failed, one)


def test_a_cell_that_begins_to_work_is_reported(tmp_path):
    cell = next(
        (runtime, name, feature)
        for name, section in SECTIONS.items()
        for feature, cells in section.rows.items()
        for runtime, state in cells.items()
        if isinstance(state, Raises)
    )
    one = outcome(tmp_path, "one", rows=[1.0])
    assert "now works" in trial._problem(cell, {cell: one})
    other = outcome(tmp_path, "", "ValueError: another error")
    assert "must raise" in trial._problem(cell, {cell: other})


def test_each_section_has_columns_of_the_page():
    counts = collections.Counter(
        runtime for section in SECTIONS.values() for runtime in section.columns
    )
    assert set(counts) == set(RUNTIMES)

"""Tests tables in the scope of a partitioning `ParameterServerStrategy`."""

import pytest

from tests import processes
from tests.sharded.server_program import ROWS

# Slow, because a cluster starts and imports two Keras versions.
pytestmark = pytest.mark.slow

_SECONDS = 150


@pytest.fixture(scope="module")
def found():
    return processes.run_program(
        "tests.sharded.server_program", seconds=_SECONDS
    )


def test_a_table_has_the_requested_number_of_shards(found):
    devices, rows = found["table_as_asked"]
    assert devices == ["task:0", "task:1", "task:0"]
    assert rows == ROWS.tolist()


def test_the_strategy_sets_the_default_number_of_shards(found):
    ours, other = found["table_as_the_strategy_divides"]
    assert sorted(ours) == sorted(other) == ["task:0", "task:1"]


@pytest.mark.parametrize(
    "case", ["normal", "seeded", "own", "keras", "tf_keras"]
)
def test_servers_draw_initial_values_that_match_one_process(found, case):
    is_same, on_servers = found["first_values"][case]
    assert is_same
    # User-defined initializers run in this process instead of on servers.
    assert on_servers == [case != "own"] * 3


@pytest.mark.exhaustive
def test_all_initializers_match_one_device_on_stock_servers():
    found = processes.run_program(
        "tests.sharded.server_program", "all_initializers", seconds=_SECONDS
    )
    assert found == {"all_initializers": {}}


def test_a_scheduled_step_trains_the_table(found):
    expected = ROWS.copy()
    expected[0] -= 1
    expected[5] -= 2
    assert found["trained_table"] == [
        float(ROWS[[0, 5, 5]].sum()),
        expected.tolist(),
    ]


@pytest.mark.parametrize("kind", ["keras", "tf_keras"])
def test_a_scheduled_step_trains_the_table_of_a_layer(found, kind):
    devices, loss, rows = found[f"{kind}_layer"]
    assert sorted(devices) == ["task:0", "task:1"]
    assert loss == 6
    assert rows == [[0, 0], [1, 1], [-1, -1]]


@pytest.mark.parametrize(
    "case",
    ["keras_layer_that_trains_itself", "tf_keras_layer_that_trains_itself"],
)
def test_a_table_with_a_built_in_optimizer_is_on_the_servers(found, case):
    # tests/ps/fit tests the training of these tables.
    assert sorted(found[case]) == ["task:0", "task:1"]


def test_an_embedding_created_outside_the_scope_raises(found):
    message = found["embedding_from_outside"]
    assert "must be created in `strategy.scope()`" in message
    assert "NotFoundError" not in message

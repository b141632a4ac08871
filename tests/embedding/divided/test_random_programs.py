"""Random programs with sharded tables equal programs of one process."""

import pickle

import pytest

from tests import covering, processes, strategies
from tests.embedding.divided import random_program as program
from tests.embedding.servers import random_pairs as pairs

# Starting the processes and tracing take most of the time of a test.
DEADLINE_SECONDS = 300


def check_same(folder, seed, count):
    """Checks that all results are bitwise equal to one process."""
    here = folder / "here"
    here.mkdir(exist_ok=True)
    expected = program.Program(
        seed, strategies.mirrored(count), list(range(count)), here, 0
    )
    expected.run()
    for worker in range(count):
        found = pickle.loads((folder / f"{seed}_{worker}.pickle").read_bytes())
        where = f"program {seed}, process {worker}"
        pairs.assert_same(found["results"], expected.results, where)
        pairs.assert_same(
            [local for (local,) in found["activations"]],
            [local[worker] for local in expected.activations],
            where,
        )
        # Only the first process calls `on_evict`.
        if worker == 0:
            evicted = pairs.by_table(expected.evicted)
            pairs.assert_same(found["evicted"], evicted, where)
        else:
            assert not found["evicted"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "first"), covering.but([(2, 3), (3, 20)], (3, 20))
)
def test_random_programs_equal_one_process(count, first, tmp_path):
    num_programs = 3 if count == 2 else 2
    processes.run_workers(
        program,
        [[str(tmp_path), str(first), str(num_programs)]] * count,
        tmp_path,
        DEADLINE_SECONDS,
    )
    for seed in range(first, first + num_programs):
        check_same(tmp_path, seed, count)

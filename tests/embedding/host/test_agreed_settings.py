"""An error is raised if processes create embeddings with different settings."""

import json

import pytest

from tests import processes
from tests.embedding.host import other_settings

# Starting the processes takes most of the time of a test.
DEADLINE_SECONDS = 180

EXPECTED = {
    "rate": "`learning_rate` of the optimizer of table 'words': 0.5 in "
    "process 0, 1.5 in process 1.",
    "clip": "`constants` of the optimizer of table 'words': [",
    "decay": "`constants` of the optimizer of table 'words': [",
    "accumulator": "`slots` of the optimizer of table 'words': [",
    "rule": "`name` of the optimizer of table 'words': 'sgd' in process 0, "
    "'adagrad' in process 1.",
    "combiner": "`combiner` of table 'words': 'sum' in process 0, 'mean' in "
    "process 1.",
    "rows": "`num_rows` of table 'words': 5 in process 0, 6 in process 1.",
    "tables": "tables: ['words'] in process 0, ['tags', 'words'] in process 1.",
    "length": "`max_sequence_length` of feature 'words': 2 in process 0, 3 in "
    "process 1.",
    "out_of_range": "argument `out_of_range`: 'error' in process 0, 'drop' in "
    "process 1.",
    "gradient_aggregation": "argument `gradient_aggregation`: 'exact' in "
    "process 0, 'local' in process 1.",
    "over_processes": "argument `over_processes`: 'replicated' in process 0, "
    "'sharded' in process 1.",
    "seed": "argument `rounding_seed`: 0 in process 0, 1 in process 1.",
    "vocabulary": "`ttl_steps` of the settings of the vocabulary of table "
    "'words': 1 in process 0, 2 in process 1.",
    "open": "of table 'words'",
    "initializer": "`initializer` of table 'words': Constant",
}

# Settings that are allowed to differ between processes.
ALLOWED = [
    "first rows of the first process",
    "a seed of each process",
    "functions of each process",
]


@pytest.mark.slow
def test_all_processes_report_what_differs(tmp_path):
    """Runs all cases in one pair of processes, because starting is slow."""
    outputs = [tmp_path / f"{index}.txt" for index in range(2)]
    processes.run_workers(
        other_settings,
        [[str(output)] for output in outputs],
        tmp_path,
        DEADLINE_SECONDS,
    )
    for output in outputs:
        found = json.loads(output.read_text())
        assert [found.pop(name) for name in ALLOWED] == ["made"] * len(ALLOWED)
        assert found.keys() == EXPECTED.keys()
        for name, words in EXPECTED.items():
            assert found[name].startswith(
                "ValueError: A TPUEmbedding must be the same in all processes"
            ), name
            assert words in found[name], name

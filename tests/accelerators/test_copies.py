"""Counts the copies between the host and a GPU in one training step.

`docs/versions.md` contains the numbers of bytes.
"""

import collections

import pytest

from tests import processes
from tests.accelerators import copies_program, fake_gpu

SECONDS = 300

BATCH, WIDTH = copies_program.BATCH, copies_program.WIDTH
COUNTS = copies_program.FEATURES.values()
TO_DEVICE, TO_HOST = "device", "host"

# A copy is a tuple of the destination, the dtype and the number of bytes.
INPUTS = [
    (TO_DEVICE, "float", 4 * BATCH * copies_program.NUM_NUMBERS),
    (TO_DEVICE, "float", 4 * BATCH),  # The labels.
]
# The stock operations of `DotInteraction` copy the index of each pair of
# features; the fourth feature is the output of the bottom MLP.
PAIRS = [(TO_DEVICE, "int32", 4 * 6)]
# `fit` checks whether the dataset has ended, and passes the loss to a callback.
FIT = [(TO_DEVICE, "bool", 1), (TO_HOST, "bool", 1), (TO_HOST, "float", 4)]


def activations_and_gradients(rows_by_feature):
    return [
        (to, "float", 4 * WIDTH * BATCH * num_rows)
        for to in (TO_DEVICE, TO_HOST)
        for num_rows in rows_by_feature
    ]


SHARDED_EMBEDDING = [
    *INPUTS,
    *PAIRS,
    *FIT,
    # The model sums the rows of a sample on the GPU.
    *activations_and_gradients(COUNTS),
    # The variables of learning rates are on the GPU.
    *[(TO_HOST, "float", 4)] * len(COUNTS),
]
EXPECTED = {
    "ShardedEmbedding": SHARDED_EMBEDDING,
    "ShardedEmbedding, open vocabulary": SHARDED_EMBEDDING,
    "layers.TPUEmbedding": [
        *INPUTS,
        *PAIRS,
        *FIT,
        *activations_and_gradients([1] * len(COUNTS)),
    ],
    "TPUEmbedding": [
        *INPUTS,
        *PAIRS,
        *activations_and_gradients([1] * len(COUNTS)),
    ],
    "open vocabulary": [
        *INPUTS,
        *PAIRS,
        *activations_and_gradients([1] * len(COUNTS)),
    ],
    # The tables are on the GPU, which requires the ids.
    "keras.layers.Embedding": [
        *INPUTS,
        *PAIRS,
        *FIT,
        *[(TO_DEVICE, "int64", 8 * BATCH * count) for count in COUNTS],
    ],
}


@pytest.fixture(scope="module")
def found(request):
    """Returns the copies of the selected programs, for each size of tables."""
    return processes.run_program(
        "tests.accelerators.copies_program",
        str(fake_gpu.library()),
        *sorted(processes.selected(request, "program")),
        seconds=SECONDS,
    )


# Slow, because Bazel builds a library, and a process trains models.
@pytest.mark.slow
@pytest.mark.covering(None)
@pytest.mark.parametrize("program", copies_program.PROGRAMS)
def test_a_step_copies_inputs_activations_and_gradients_once(program, found):
    for copies, num_rows in zip(found[program], copies_program.SIZES):
        counts = collections.Counter(
            (one["to"], one["dtype"], one["num_bytes"])
            for one in copies
            # A control edge between devices copies an empty tensor.
            if one["num_bytes"]
        )
        assert counts == collections.Counter(EXPECTED[program]), copies
        largest = max(one["num_bytes"] for one in copies)
        assert largest < 4 * WIDTH * num_rows / 10


def test_the_table_of_the_documentation_contains_the_bytes():
    assert EXPECTED.keys() == copies_program.PROGRAMS.keys()
    page = (fake_gpu.ROOT / "docs" / "versions.md").read_text()
    for copies in EXPECTED.values():
        num_bytes = collections.Counter()
        for to, _, size in copies:
            num_bytes[to] += size
        cells = f"| {num_bytes[TO_DEVICE]:,} | {num_bytes[TO_HOST]:,} |"
        assert cells in page

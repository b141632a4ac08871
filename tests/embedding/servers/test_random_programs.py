"""Random programs over servers equal the same programs of one process."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.embedding.servers import random_pairs as pairs

KINDS = (
    *["train"] * 3,
    *[
        "packed",
        "traced",
        "forward",
        "abandon",
        "calls",
        "evict",
        "expire",
        "report",
    ],
    *["resize", "write", "read", "export", "checkpoint", "convert", "delta"],
    "delta",
)


@st.composite
def setups(draw):
    names = draw(st.sampled_from(pairs.NAMES))

    def by_name(values):
        return {name: draw(st.sampled_from(sorted(values))) for name in names}

    return pairs.Setup(
        names,
        draw(st.sampled_from([1, 20, 60, 200])),
        draw(st.sampled_from(sorted(pairs.POLICIES))),
        by_name(pairs.OPTIMIZERS),
        by_name(pairs.COMBINERS),
        by_name(pairs.DTYPES),
        tuple(name for name in names if draw(st.booleans())),
        draw(st.sampled_from(["error", "drop", "clip"])),
        draw(st.booleans()),
    )


@given(
    setup=setups(),
    num_servers=st.integers(1, 3),
    num_shards=st.integers(1, 4),
    program=st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(0, 10**6)), max_size=10
    ),
)
@settings(max_examples=6)
def test_random_programs_equal_one_process(
    setup, num_servers, num_shards, program
):
    pair = pairs.Pair(setup, num_servers, num_shards)
    for kind, seed in program:
        pair.run(kind, seed)
    pair.check_reports()

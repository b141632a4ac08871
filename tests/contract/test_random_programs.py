"""Random programs on logical CPUs of this process equal the host.

`test_contract` runs random programs on the other runtimes.
"""

import os
import random

import pytest

from tests import covering, strategies
from tests.contract import random_programs, runtimes, setups
from tests.contract.families import FAMILIES

# With more servers, some shards would be on the same logical CPU.
assert strategies.NUM_DEVICES >= 3

# A program with few calls, so `make test` runs it.
SEED = 7
MORE_SEEDS = [one for one in range(40) if one != SEED]
if os.environ.get("TF_LAYOUTMAP_EXPLORE") == "1":
    MORE_SEEDS = random.sample(range(40, 10**9), 200)


@pytest.mark.parametrize("seed", covering.first(SEED, *MORE_SEEDS))
def test_several_lookups_per_step_equal_the_host(seed, tmp_path):
    found = []
    for runtime in (runtimes.LocalServers(), runtimes.Runtime()):
        runtime.start(tmp_path / runtime.name)
        assert runtime.name in FAMILIES["lookups"].runtimes
        found.append(random_programs.program_of("lookups", seed)(runtime))
    setups.assert_same(*found, f"program {seed}")


@pytest.mark.parametrize("name", FAMILIES)
def test_consecutive_programs_make_all_calls(name):
    family = FAMILIES[name]
    made = {
        call
        for seed in (1, 2)
        for call, _ in random_programs.draw(family, seed)[2]
    }
    assert made == {"train", *family.calls}

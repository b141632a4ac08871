"""Short programs, as in tutorials, each trained for a few steps.

Every function creates its data and models, like a separate program, and does
not use a mesh. It returns its losses and the models whose weights the case
shards.
"""

from tests.real.program import ProgramCase
from tests.real.programs import (
    adapting,
    diffusion,
    generative,
    images,
    series,
    shapes,
    similarity,
    steps,
    tables,
    text,
)

MODULES = [
    adapting,
    diffusion,
    generative,
    images,
    series,
    shapes,
    similarity,
    steps,
    tables,
    text,
]

PROGRAMS = [program for module in MODULES for program in module.PROGRAMS]

# Every second program runs under the scope, the others after
# `set_distribution`.
CASES = {
    program.__name__: ProgramCase(program, scope=number % 2 == 0)
    for number, program in enumerate(PROGRAMS)
}

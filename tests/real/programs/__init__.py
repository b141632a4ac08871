"""Short programs, as in tutorials, each trained for a few steps.

Like a separate program, every function creates its data and models, and does
not refer to a mesh. A function returns its losses and its models. The weights
of these models are sharded in the test cases.
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

# Programs alternate between `layout_map_scope` and `set_distribution`.
CASES = {
    program.__name__: ProgramCase(program, scope=number % 2 == 0)
    for number, program in enumerate(PROGRAMS)
}

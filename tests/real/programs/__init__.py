"""Short programs of the kinds that tutorials have, each trained a few steps.

Every function makes its own data and models, as a program of its own would,
and knows nothing of a mesh. It returns its losses, and the models whose
weights are to be divided.
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

# Every other one under the scope, instead of after `set_distribution`.
CASES = {
    program.__name__: ProgramCase(program, scope=number % 2 == 0)
    for number, program in enumerate(PROGRAMS)
}

"""Runs a program in a process with GPUs in host memory.

python -m tests.accelerators.example_program LIBRARY NUM_GPUS PROGRAM ...
"""

import pathlib
import runpy
import sys

from tests.accelerators import fake_gpu


def main() -> None:
    path, count, program, *arguments = sys.argv[1:]
    fake_gpu.load_for_tests(path, int(count))
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(pathlib.Path(program).parent))
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()

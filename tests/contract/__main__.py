"""Tries each feature on each runtime, and writes the page about it.

    python -m tests.contract                 tries all cells
    python -m tests.contract --runtime host  one runtime
    python -m tests.contract --only evict    features with `evict` in their name
    python -m tests.contract --page          only writes the page

Prints each cell whose result differs from tests/contract/declared.py, and then
exits with 1. If all cells were tried and no cell differs, the command writes
docs/features_by_runtime.md.
"""

import argparse
import pathlib
import sys
import tempfile

from tests.contract import page, trial
from tests.contract.declared import SECTIONS
from tests.contract.states import RUNTIMES


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--runtime", nargs="+", choices=RUNTIMES, default=list(RUNTIMES)
    )
    parser.add_argument("--section", nargs="+", choices=SECTIONS)
    parser.add_argument("--only", default="", help="part of the features")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path, help="keeps all files")
    options = parser.parse_args()
    if options.page:
        page.write()
        print(f"Written: {page.PAGE}")
        return 0
    cells = trial.cells(
        options.runtime, options.section or list(SECTIONS), options.only
    )
    with tempfile.TemporaryDirectory() as folder:
        found = trial.Trial(options.folder or pathlib.Path(folder)).problems(
            cells
        )
    for (runtime, section, feature), problem in found.items():
        print(f"{runtime}, {section}, {feature}: {problem}")
    print(f"{len(found)} of {len(cells)} cells differ from the declared states")
    if found:
        return 1
    if len(cells) == len(trial.cells(list(RUNTIMES), list(SECTIONS))):
        page.write()
        print(f"Written: {page.PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs one test case; `sweep.py` reads its output."""

import argparse

from tests.real import kinds
from tests.real.compare import say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=[*kinds.KINDS, *kinds.SELF_TEST])
    parser.add_argument("name")
    options = parser.parse_args()
    case = kinds.cases(options.kind)[options.name]
    case.run()
    say("DONE")


if __name__ == "__main__":
    main()

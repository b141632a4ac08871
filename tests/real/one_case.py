"""Runs one case; `sweep.py` reads what it prints."""

import argparse

from tests.real import kinds
from tests.real.compare import say


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=[*kinds.KINDS, *kinds.SELF_TEST])
    parser.add_argument("name")
    parser.add_argument(
        "--missing-ops", action="store_true",
        help="call tlm.dtensor.enable_missing_ops() before")
    options = parser.parse_args()
    case = kinds.cases(options.kind)[options.name]
    if options.missing_ops:
        import tf_layoutmap as tlm
        tlm.dtensor.enable_missing_ops()
    case.run()
    say("DONE")


if __name__ == "__main__":
    main()

"""Implements `python -m tf_layoutmap`.

The command prints a report about the installation for bug reports, and runs the
self-check. The exit code is 1 if a package is missing or the self-check fails.
"""

import os
import sys

# Disables messages that TensorFlow logs when it starts, because the messages
# would appear in the middle of the report.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from tf_layoutmap import process_report


def main() -> int:
    problems = process_report.problems()
    print(process_report.describe_process(), flush=True)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    try:
        print(f"Self-check:     {process_report.check_process()}")
    except RuntimeError as error:
        print(f"Self-check failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

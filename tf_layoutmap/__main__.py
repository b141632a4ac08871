"""Implements `python -m tf_layoutmap`: prints a report and runs the self-check.

The report has the information for a bug report. The exit status is 1 if a
package is missing or the self-check fails.
"""

import os
import sys

# Disables TensorFlow's log at start-up, which would be mixed with the report.
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

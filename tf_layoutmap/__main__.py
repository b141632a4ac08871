"""Implements `python -m tf_layoutmap`.

The command prints a report about the installation for bug reports, and runs the
self-check. The exit code is 1 if a package is missing or the self-check fails.
`python -m tf_layoutmap advise MODEL` prints what `tlm.layers.shard_embeddings`
would do with a model. `python -m tf_layoutmap plan MODULE:FUNCTION` prints the
plan of a model. `python -m tf_layoutmap check` compares training steps with
Keras alone.
"""

import os
import sys
from collections.abc import Callable

# Disables messages that TensorFlow logs when it starts, because the messages
# would appear in the middle of the report.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from tf_layoutmap import process_report


def print_unknown_functions() -> None:
    """Prints which replaced functions of Keras were not tested."""
    unknown = process_report.unknown_functions()
    print(
        "Keras functions: "
        + ("as tested" if not unknown else f"{len(unknown)} not tested")
    )
    for function in unknown:
        print(f"  {function}")


def check() -> int:
    """Compares Keras with the tested versions, and steps with Keras alone."""
    process_report.use_two_devices()
    print_unknown_functions()
    from tf_layoutmap import keras_check

    return print_result("Check", keras_check.compare_with_stock)


def print_result(title: str, run: Callable[[], str]) -> int:
    """Prints the result or the error of a check; returns the exit code."""
    try:
        print(f"{title + ':':<16}{run()}")
    except RuntimeError as error:
        print(f"{title} failed: {error}", file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["advise"]:
        from tf_layoutmap.layers import advise

        return advise.main(arguments[1:])
    if arguments[:1] == ["plan"]:
        from tf_layoutmap.planning import command

        return command.main(arguments[1:])
    if arguments == ["check"]:
        return check()
    if arguments:
        print(
            "Usage: python -m tf_layoutmap [advise MODEL | check | plan "
            "MODULE:FUNCTION]. Received: "
            f"{' '.join(arguments)}",
            file=sys.stderr,
        )
        return 2
    problems = process_report.problems()
    print(process_report.describe(), flush=True)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    print_unknown_functions()
    return print_result("Self-check", process_report.check_process)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

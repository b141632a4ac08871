"""Runs third-party models and programs with and without a mesh (`make real`).

    python -m tests.real                        all cases
    python -m tests.real --only gpt2            cases with `gpt2` in their name
    python -m tests.real --kind programs        one kind
    python -m tests.real --list

The exit code is 1 if a case crashed, differs or is broken.
"""

import argparse
import concurrent.futures
import pathlib
import sys

from tests.real import kinds, results, sweep


def chosen(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns the kind and the name of each selected case."""
    return [
        (kind, name)
        for kind in kinds.KINDS
        if options.kind.lower() in kind.lower()
        for name in kinds.cases(kind)
        if options.only.lower() in name.lower()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="part of the names")
    parser.add_argument("--kind", default="", help="part of the kind")
    parser.add_argument("--list", action="store_true")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="number of parallel processes, 2 GB each",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=900,
        help="time limit per case in seconds; InceptionResNetV2 and "
        "NASNetMobile take several minutes",
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        metavar="FILE",
        help="file for the results, updated after each case",
    )
    parser.add_argument(
        "--markdown",
        type=pathlib.Path,
        metavar="PAGE",
        help="page whose tables are replaced by the results",
    )
    parser.add_argument(
        "--results",
        type=pathlib.Path,
        nargs="+",
        help="files written by --json; no case is run",
    )
    parser.add_argument(
        "--earlier",
        type=pathlib.Path,
        nargs="+",
        default=[],
        help="files written by --json of an earlier version; --markdown adds "
        "their replicated bytes",
    )
    options = parser.parse_args()
    if options.results:
        return report(options, read(options.results))
    found = chosen(options)
    if not found:
        parser.error("no case matches --kind and --only")
    if options.list:
        for kind, name in found:
            print(f"{kind}: {name}")
        return 0
    done = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for number, result in enumerate(
            pool.map(
                lambda case: sweep.run(*case, seconds=options.deadline), found
            ),
            1,
        ):
            done.append(result)
            print(
                f"[{number}/{len(found)}] {result.name}: {result.status} "
                f"({result.seconds:.0f} s) {result.sentence[:160]}",
                flush=True,
            )
            if options.json:
                options.json.write_text(results.to_json(done))
    return report(options, done)


def read(files: list[pathlib.Path]) -> list[results.Result]:
    """Returns the results in files that `--json` wrote."""
    return [
        result
        for file in files
        for result in results.from_json(file.read_text())
    ]


def report(options: argparse.Namespace, done: list[results.Result]) -> int:
    """Prints the results and writes them to files; returns the exit code."""
    results.print_table(done)
    if options.markdown:
        results.write_page(options.markdown, done, read(options.earlier))
    return int(any(result.status in results.FAILURES for result in done))


if __name__ == "__main__":
    sys.exit(main())

"""Tries the programs of the contract, and compares them with the host.

`python -m tests.contract.trial GROUP FOLDER FIRST` runs the cells of one group
of runtimes; `run_group` starts this program, once per process of the group.
"""

import json
import os
import pathlib
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tests import forked_process, processes
from tests.contract.declared import SECTIONS
from tests.contract.families import FAMILIES
from tests.contract.states import NotTried, Outcome, Raises, State, Works
from tf_layoutmap.local_cluster import free_ports

# Runtimes that run in the same processes, by the name of the group.
GROUPS = {
    "local": ("host", "mirrored", "local_servers", "mesh"),
    "workers": ("replicated", "sharded"),
    "servers": ("servers",),
    "tpu": ("tpu", "tpu_host"),
    "sparse_cores": ("sparse_cores",),
}
NUM_WORKERS = 2
# Time limit of one cell, in seconds. The limit is long, because other programs
# can delay a process.
CELL_SECONDS = 400.0
_POLL_SECONDS = 0.1
# Exit code of a process after collectives have failed. TensorFlow cannot use
# the collectives of this group of processes again.
_RESTART = 75

# A cell: the runtime, the section and the feature. For a random program, the
# section is `RANDOM` and its family, and the feature is its seed.
Cell = tuple[str, str, str]
RANDOM = "random "


def group_of(runtime: str) -> str:
    """Returns the group whose processes run a runtime."""
    return next(name for name, names in GROUPS.items() if runtime in names)


def run_group(
    group: str, cells: Sequence[Cell], folder: pathlib.Path
) -> dict[Cell, Outcome]:
    """Runs cells in the processes of a group.

    If a cell ends or blocks a process, the processes are started again for the
    remaining cells.

    Args:
      group: Key of `GROUPS`.
      cells: Cells whose runtimes belong to the group.
      folder: Folder for the files of all programs.

    Returns:
      The outcome of each cell.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cells.json").write_text(json.dumps(cells))
    outcomes: dict[Cell, Outcome] = {}
    repeated: set[Cell] = set()
    while len(outcomes) < len(cells):
        first = len(outcomes)
        workers = _start(group, folder, first)
        try:
            failure = _wait(workers, folder, len(cells), first)
        finally:
            for one in workers:
                one.kill()
        done = _num_done(folder, len(workers), first)
        for number in range(first, done):
            outcomes[cells[number]] = _read(folder, number, len(workers))
        if _must_restart(workers):
            last = cells[done - 1]
            error = outcomes[last].error or ""
            if last not in repeated and re.search("[Hh]eartbeat", error):
                # The process was suspended for too long, so the cell is
                # tried again.
                repeated.add(last)
                del outcomes[last]
                shutil.rmtree(folder / f"cell_{done - 1}")
            continue
        if not (folder / f"started_{first}_0").exists():
            raise RuntimeError(
                f"The processes of group {group!r} did not start. {failure} "
                f"{workers[0].log.read_text()[-2000:]}"
            )
        if done < len(cells):
            outcomes[cells[done]] = Outcome(
                f"{failure} {workers[0].log.read_text()[-2000:]}"
            )
    return outcomes


def _must_restart(workers: list[processes.Worker]) -> bool:
    """Returns whether a process has ended because of failed collectives."""
    return any(one.process.poll() == _RESTART for one in workers)


def _start(
    group: str, folder: pathlib.Path, first: int
) -> list[processes.Worker]:
    count = NUM_WORKERS if group == "workers" else 1
    ports = [f"localhost:{port}" for port in free_ports(count)]
    workers = []
    for worker in range(count):
        environment = {
            **os.environ,
            "PYTHONPATH": str(processes.ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CONTRACT_WORKER": str(worker),
        }
        if group == "workers":
            environment["TF_CONFIG"] = json.dumps(
                {
                    "cluster": {"worker": ports},
                    "task": {"type": "worker", "index": worker},
                }
            )
        log = folder / f"log_{worker}_{first}"
        workers.append(
            processes.Worker(
                log,
                forked_process.ForkedProcess(
                    [
                        "-m",
                        "tests.contract.trial",
                        group,
                        str(folder),
                        str(first),
                    ],
                    log,
                    cwd=processes.ROOT,
                    env=environment,
                ),
            )
        )
    return workers


def _wait(
    workers: list[processes.Worker],
    folder: pathlib.Path,
    num_cells: int,
    first: int,
) -> str:
    """Waits until all cells are done, or a cell makes no progress.

    Returns:
      The reason why the next cell has no result.
    """
    done = first
    deadline = time.monotonic() + CELL_SECONDS
    while done < num_cells:
        time.sleep(_POLL_SECONDS)
        ended = [one.process.poll() for one in workers]
        now = _num_done(folder, len(workers), done)
        if now > done:
            done, deadline = now, time.monotonic() + CELL_SECONDS
        elif any(code is not None for code in ended):
            return f"The process ended with exit code {ended}."
        elif time.monotonic() > deadline:
            return f"The program did not end within {CELL_SECONDS} s."
    return ""


def _num_done(folder: pathlib.Path, num_workers: int, first: int) -> int:
    number = first
    while all(
        _result(folder, number, worker).exists()
        for worker in range(num_workers)
    ):
        number += 1
    return number


def _result(folder: pathlib.Path, number: int, worker: int) -> pathlib.Path:
    return folder / f"cell_{number}" / f"result_{worker}.json"


def _read(folder: pathlib.Path, number: int, num_workers: int) -> Outcome:
    """Returns the outcome of a cell in all processes.

    An error in one process is also the outcome of the cell if the other
    processes succeed.
    """
    found = [
        Outcome(**json.loads(_result(folder, number, worker).read_text()))
        for worker in range(num_workers)
    ]
    return next((one for one in found if one.error is not None), found[0])


def cells(
    runtimes: Sequence[str], sections: Sequence[str], only: str = ""
) -> list[Cell]:
    """Returns the cells that a program can try.

    Args:
      runtimes: Runtimes of the cells.
      sections: Sections of the cells.
      only: Text that the name of each feature contains.
    """
    return [
        (runtime, name, feature)
        for runtime in runtimes
        for name in sections
        for feature in SECTIONS[name].rows
        if runtime in SECTIONS[name].columns
        and only in feature
        and not isinstance(SECTIONS[name].state(feature, runtime), NotTried)
    ]


def random_cells(
    runtimes: Sequence[str], seeds: Mapping[str, Iterable[int]]
) -> list[Cell]:
    """Returns the cells of random programs.

    Args:
      runtimes: Runtimes of the cells.
      seeds: Seeds by family.
    """
    return [
        (runtime, RANDOM + name, str(seed))
        for name, own in seeds.items()
        for runtime in FAMILIES[name].runtimes
        if runtime in runtimes
        for seed in own
    ]


def reference_of(cell: Cell) -> Cell:
    """Returns the cell whose numbers a cell must have."""
    _, section, feature = cell
    name = "host"
    if section.startswith(RANDOM):
        name = FAMILIES[section.removeprefix(RANDOM)].runtimes[0]
    return name, section, feature


def state_of(cell: Cell) -> State:
    """Returns the declared state of a cell; all random programs work."""
    runtime, section, feature = cell
    if section.startswith(RANDOM):
        return Works()
    return SECTIONS[section].state(feature, runtime)


class Trial:
    """Runs cells, and compares them with their declared states.

    Cells that have run are not run again.

    Args:
      folder: Folder for the files of all programs.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._outcomes: dict[Cell, Outcome] = {}
        self._num_runs = 0

    def run(self, wanted: Iterable[Cell]) -> None:
        """Runs cells and their references, once per group of runtimes."""
        wanted = list(wanted)
        every = {reference_of(one) for one in wanted} | set(wanted)
        missing = sorted(
            every - self._outcomes.keys(),
            key=lambda one: (one != reference_of(one), one),
        )
        self._num_runs += 1
        for group, runtimes in GROUPS.items():
            own = [one for one in missing if one[0] in runtimes]
            if own:
                folder = self._folder / f"{self._num_runs}_{group}"
                self._outcomes |= run_group(group, own, folder)

    def problems(self, wanted: Iterable[Cell]) -> dict[Cell, str]:
        """Returns the cells that differ from their declared states, and how."""
        wanted = list(wanted)
        self.run(wanted)
        return {
            cell: problem
            for cell in {reference_of(one) for one in wanted} | set(wanted)
            if (problem := _problem(cell, self._outcomes)) is not None
        }


def _problem(cell: Cell, outcomes: dict[Cell, Outcome]) -> str | None:
    """Returns how a cell differs from its declared state, or None."""
    state, outcome = state_of(cell), outcomes[cell]
    if isinstance(state, Raises):
        if outcome.error is None:
            return "declared as raising, and now works"
        if not re.search(state.error, outcome.error, re.DOTALL):
            return f"must raise {state.error!r}. Received: {outcome.error}"
        return None
    if outcome.error is not None:
        return f"must work. Received: {outcome.error}"
    reference = outcomes[reference_of(cell)]
    if reference.error is not None:
        return "cannot be compared, because the host raises an error"
    tolerance = getattr(state, "tolerance", 0.0)
    try:
        gap = difference(
            outcome, reference, getattr(state, "ignored", ""), not tolerance
        )
    except AssertionError as error:
        return f"must return the numbers of the host: {error}"
    if gap > tolerance:
        return f"differs from the host by {gap}"
    return None


def difference(
    found: Outcome, wanted: Outcome, ignored: str = "", is_exact: bool = True
) -> float:
    """Returns the largest absolute difference of the numbers of two outcomes.

    Args:
      found: Outcome of a runtime.
      wanted: Outcome of the host.
      ignored: Regular expression of names that are not compared.
      is_exact: Whether numbers without a difference must have the same bits.

    Raises:
      AssertionError: If the outcomes have other names or shapes, or no numbers.
    """
    assert found.numbers is not None and wanted.numbers is not None
    with np.load(found.numbers) as one, np.load(wanted.numbers) as other:
        assert sorted(one) == sorted(other), (sorted(one), sorted(other))
        assert one.files, "The program must return numbers."
        largest = 0.0
        for name in one.files:
            if ignored and re.search(ignored, name):
                continue
            value, reference = one[name], other[name]
            assert value.shape == reference.shape, (
                name,
                value.shape,
                reference.shape,
            )
            if value.dtype.kind not in "fiub":
                assert np.array_equal(value, reference), name
            elif value.size and not np.array_equal(value, reference):
                gap = np.abs(value.astype(float) - reference.astype(float))
                largest = max(largest, float(gap.max()))
                assert not np.isnan(gap).any(), name
            elif is_exact:
                assert value.dtype == reference.dtype, name
                assert value.tobytes() == reference.tobytes(), name
        return largest


# The program of one process.


def main(group: str, folder: str, first: str) -> None:
    from tests.contract import runtimes

    root = pathlib.Path(folder)
    cells: list[Cell] = [
        tuple(one) for one in json.loads((root / "cells.json").read_text())
    ]
    created, keep = runtimes.create(group)
    # The programs are imported after devices and processes are configured,
    # because importing them runs operations.
    from tests.contract import programs, random_programs

    by_name = {one.name: one for one in created}
    worker = int(os.environ["CONTRACT_WORKER"])
    (root / f"started_{first}_{worker}").touch()
    for number in range(int(first), len(cells)):
        name, section, feature = cells[number]
        own = root / f"cell_{number}"
        program = (
            random_programs.program_of(
                section.removeprefix(RANDOM), int(feature)
            )
            if section.startswith(RANDOM)
            else programs.program_of(section, feature)
        )
        outcome = _run(by_name[name], program, own)
        path = _result(root, number, worker)
        partial = path.with_suffix(".partial")
        partial.write_text(
            json.dumps({"error": outcome.error, "numbers": outcome.numbers})
        )
        partial.rename(path)
        _wait_for_others(root, number, group)
        if outcome.error and re.search("[Cc]ollective", outcome.error):
            os._exit(_RESTART)
        _remove_files(own)
    # Threads of servers and of coordinators never end.
    del keep
    sys.stdout.flush()
    os._exit(0)


def _wait_for_others(root: pathlib.Path, number: int, group: str) -> None:
    """Waits until all processes have ended a cell, even if one has failed."""
    count = NUM_WORKERS if group == "workers" else 1
    deadline = time.monotonic() + CELL_SECONDS
    while _num_done(root, count, number) == number:
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS / 10)


def _run(runtime, program, folder: pathlib.Path) -> Outcome:
    try:
        runtime.start(folder)
        numbers = program(runtime)
    except Exception as error:
        traceback.print_exc()
        return Outcome(f"{type(error).__name__}: {error}")
    if not runtime.is_first:
        return Outcome()
    path = folder / "numbers.npz"
    np.savez(path, **numbers)
    return Outcome(None, str(path))


def _remove_files(folder: pathlib.Path) -> None:
    """Removes the large files of a program of a single process."""
    if "TF_CONFIG" in os.environ:
        return
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)


if __name__ == "__main__":
    main(*sys.argv[1:])

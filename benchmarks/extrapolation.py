"""Extrapolates the time of a step to more servers and devices.

    python -m benchmarks.extrapolation PICTURE

The program does not measure anything. It computes the numbers of
`docs/scaling.md` from costs that other benchmarks measured, and from an assumed
network. It prints the tables of the page, and writes its picture.
"""

import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable, Mapping

from benchmarks import line_picture

SERVERS = (1, 8, 64, 512)
DEVICES = (2, 8, 64)


@dataclasses.dataclass(frozen=True)
class Network:
    """A network between processes.

    Attributes:
      bytes_per_ms: Bytes that a process sends and receives per millisecond.
      latency_ms: Time of a message without its bytes.
    """

    bytes_per_ms: float = 25e9 / 8 / 1e3
    latency_ms: float = 0.05


@dataclasses.dataclass(frozen=True)
class Tables:
    """Measured costs of a step of tables over parameter servers.

    One worker runs 16 steps per closure. There are as many workers as servers,
    and each process has one core. All times are in milliseconds of processor
    time.

    Attributes:
      rows: Number of distinct rows of the step of a worker.
      worker_row: Time of the worker per row.
      server_row: Time of a server per row.
      worker_call: Time of the worker per server.
      server_call: Time of a server per step of a worker.
      row_bytes: Bytes per row that are sent in both directions together.
      closure: Time of the coordinator per closure.
      closure_steps: Number of steps of a closure.
    """

    rows: int = 52_224
    worker_row: float = 0.17e-3
    server_row: float = 0.13e-3
    worker_call: float = 0.25
    server_call: float = 0.2
    row_bytes: float = 130
    closure: float = 0.63
    closure_steps: int = 16

    def parts(self, servers: int, network: Network) -> dict[str, float]:
        """Returns the time of each part of a step, in milliseconds.

        The parts of all processes run at the same time, so the time of a step
        is at least the time of the longest part.
        """
        workers = servers
        # Half of the bytes are sent in each direction, at the same time.
        sent = self.rows * self.row_bytes / 2 / network.bytes_per_ms
        return {
            "rows, worker": self.rows * self.worker_row,
            "calls, worker": servers * self.worker_call,
            "rows, server": workers * self.rows / servers * self.server_row,
            "calls, server": workers * self.server_call,
            "network": sent + 2 * network.latency_ms,
            "coordinator": workers * self.closure / self.closure_steps,
        }

    def step(self, servers: int, network: Network) -> float:
        """Returns the time of a step, in milliseconds.

        A process does not compute rows and calls at the same time.
        """
        parts = self.parts(servers, network)
        worker = parts["rows, worker"] + parts["calls, worker"]
        server = parts["rows, server"] + parts["calls, server"]
        # The worker waits for the bytes of its own step.
        return max(worker + parts["network"], server, parts["coordinator"])


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Counts of a program whose weights are sharded over all devices.

    Attributes:
      compute: Time of the program on one device, in milliseconds.
      collectives: Number of all-reduces.
      sent: Bytes that a device of two devices sends.
    """

    compute: float
    collectives: int
    sent: float

    def parts(self, devices: int, network: Network) -> dict[str, float]:
        """Returns the time of each part, which run one after the other."""
        # A ring of n devices sends (n - 1) / n of the bytes twice, in
        # 2 (n - 1) messages.
        return {
            "arithmetic": self.compute / devices,
            "latency": self.collectives
            * 2
            * (devices - 1)
            * network.latency_ms,
            "network": 2
            * self.sent
            * (devices - 1)
            / devices
            / network.bytes_per_ms,
        }

    def step(self, devices: int, network: Network) -> float:
        """Returns the time of the program, in milliseconds."""
        return sum(self.parts(devices, network).values())


# The decoder with 20 M parameters of `mesh_counts`, 4 samples of 128 tokens.
# The times without a mesh are from `mesh_models`, on two cores.
DECODER_STEP = Decoder(435, 57, 21_310_468)
DECODER_TOKEN = Decoder(321 / 32, 14, 39_952)


def print_table(
    title: str,
    sizes: tuple[int, ...],
    parts_of: Callable[[int], Mapping[str, float]],
    step_of: Callable[[int], float],
) -> None:
    """Prints the parts and the time of a step for several sizes."""
    print(f"\n{title}\n| | {' | '.join(map(str, sizes))} |")
    columns = [{**parts_of(size), "step": step_of(size)} for size in sizes]
    for name in columns[0]:
        cells = (f"{column[name]:.3g}" for column in columns)
        print(f"| {name} | {' | '.join(cells)} |")


def picture(network: Network) -> str:
    """Returns the picture of the page."""
    tables = Tables()
    servers = [2**power for power in range(10)]
    devices = [2**power for power in range(7)]

    def lines(program, sizes):
        names = program.parts(1, network)
        return [
            line_picture.Line(
                "step",
                [(n, program.step(n, network)) for n in sizes],
                0,
            ),
            *(
                line_picture.Line(
                    name,
                    [
                        (n, value)
                        for n in sizes
                        if (value := program.parts(n, network)[name]) > 1e-3
                    ],
                    color,
                    is_dashed=True,
                )
                for color, name in enumerate(names, 1)
            ),
        ]

    return line_picture.svg(
        [
            line_picture.Chart(
                "Tables: ms per step",
                "servers and workers",
                lines(tables, servers),
            ),
            line_picture.Chart(
                "Decoder: ms per step", "devices", lines(DECODER_STEP, devices)
            ),
            line_picture.Chart(
                "Decoder: ms per token",
                "devices",
                lines(DECODER_TOKEN, devices),
            ),
        ],
        "Extrapolated times; dashed lines are parts of a step",
    )


def main(path: str) -> None:
    """Prints the tables, and writes the picture."""
    network = Network()
    tables = Tables()
    print_table(
        "Tables, servers",
        SERVERS,
        lambda n: tables.parts(n, network),
        lambda n: tables.step(n, network),
    )
    for title, program in (
        ("Decoder, step, devices", DECODER_STEP),
        ("Decoder, token, devices", DECODER_TOKEN),
    ):
        print_table(
            title,
            DEVICES,
            lambda n, program=program: program.parts(n, network),
            lambda n, program=program: program.step(n, network),
        )
    calls = tables.rows * tables.worker_row / tables.worker_call
    print(f"\nCalls take longer than rows with {math.ceil(calls)} servers.")
    pathlib.Path(path).write_text(picture(network))


if __name__ == "__main__":
    main(*sys.argv[1:])

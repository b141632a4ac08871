"""`python -m tf_layoutmap plan`: prints the plan of a model."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tf_layoutmap._core import files


def read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the arguments of the command, or exits with a message."""
    parser = argparse.ArgumentParser(
        prog="python -m tf_layoutmap plan",
        description="Prints how tlm.plan would store the weights of a Keras "
        "model on a mesh, or the tables of a feature config on servers.",
    )
    parser.add_argument(
        "model",
        help="module:function with a function without arguments. It returns a "
        "Keras model, or a feature config of tlm.TPUEmbedding.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--devices",
        type=read_count,
        help='Number of devices of a mesh with one axis "model".',
    )
    where.add_argument(
        "--mesh",
        type=read_mesh,
        help="Axes of a mesh, such as batch=2,model=4.",
    )
    where.add_argument(
        "--num-servers", type=read_count, help="Number of parameter servers."
    )
    where.add_argument(
        "--num-workers",
        type=read_count,
        help="Number of processes of a MultiWorkerMirroredStrategy.",
    )
    parser.add_argument(
        "--memory",
        help="Bytes on each device, such as 16GiB. Required for tables. "
        "Without this option, each weight of a Keras model is sharded if a "
        "step does not have to gather it.",
    )
    parser.add_argument(
        "--batch-size", type=read_count, help="Number of samples in a step."
    )
    parser.add_argument(
        "--optimizer",
        help="Name of the optimizer, such as adam. The default is the "
        "optimizer of the compiled model. For tables: sgd, adagrad, adam or "
        "ftrl.",
    )
    parser.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="NAME=CHOICE",
        help="Choice that must be selected, such as words=replicate.",
    )
    parser.add_argument(
        "--explain",
        action="append",
        default=[],
        metavar="NAME",
        help="Prints the reasons for an item.",
    )
    parser.add_argument("--html", help="Writes a page to this file.")
    parser.add_argument(
        "--json",
        help="Writes the plan to this file, for tlm.planning.Plan.from_dict.",
    )
    return parser.parse_args(arguments)


def read_count(text: str) -> int:
    """Returns a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"must be a number of at least 1. Received: {text!r}"
        )
    return int(text)


def read_mesh(text: str) -> dict[str, int]:
    """Returns the sizes of the axes of a mesh.

    >>> read_mesh("batch=2,model=4")
    {'batch': 2, 'model': 4}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not name or not size.isdigit() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"must be axes such as batch=2,model=4. Received: {text!r}"
            )
        sizes[name] = int(size)
    return sizes


def read_pins(pins: Sequence[str]) -> dict[str, str]:
    """Returns the pins of arguments such as `words=replicate`.

    Raises:
      ValueError: If an argument has no `=`.
    """
    choices: dict[str, str] = {}
    for pin in pins:
        name, equals, choice = pin.rpartition("=")
        if not equals:
            raise ValueError(f"--pin must be NAME=CHOICE. Received: {pin!r}.")
        choices[name] = choice
    return choices


def _prepare_devices(count: int) -> None:
    """Creates logical CPUs if the machine has too few devices."""
    import tensorflow as tf

    from tf_layoutmap.layout.mesh import cpu_threads

    if len(tf.config.list_physical_devices("GPU")) >= count:
        return
    (cpu, *_) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )
    cpu_threads.share_cores()


def find_function(target: str) -> Callable[[], Any]:
    """Returns the function that creates a model.

    Args:
      target: `module:function`.

    Raises:
      ValueError: If the module or the function does not exist, or if the
        function has required arguments.
    """
    name, _, attribute = target.partition(":")
    if not name or not attribute:
        raise ValueError(
            f"The model must be module:function. Received: {target!r}."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module may itself import a module that does not exist.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"Python found no module {error.name!r}. Run the command in the "
            "folder that contains the module, or set PYTHONPATH. Received: "
            f"{target!r}."
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [
            key for key, value in vars(module).items() if callable(value)
        ]
        near = difflib.get_close_matches(attribute, functions, 1)
        raise ValueError(
            f"Module {name!r} has no function {attribute!r}."
            + (f" Did you mean {name}:{near[0]}?" if near else "")
        )
    required = [
        key
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind
        not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required:
        raise ValueError(
            f"The function {target} must have no required arguments. Received: "
            f"arguments {', '.join(required)}."
        )
    return function


def _check_options(model: Any, options: argparse.Namespace, mesh: Any) -> None:
    """Raises ValueError if an option is missing or does not fit the model."""
    from tf_layoutmap.planning import planner

    if planner.is_keras_layer(model):
        if mesh is None:
            raise ValueError(
                "A Keras model requires the option --devices or --mesh, such "
                "as --mesh batch=2,model=4."
            )
        return
    if mesh is not None:
        raise ValueError(
            "A feature config requires the option --num-servers or "
            "--num-workers, or neither for one process, and not --devices "
            "or --mesh."
        )
    if options.memory is None:
        raise ValueError(
            "A feature config requires the option --memory, such as "
            "--memory 16GiB."
        )


def _table_optimizer(name: str) -> Any:
    import tensorflow as tf

    tpu: Any = tf.tpu.experimental.embedding  # pyright: ignore
    rules = {
        "sgd": tpu.SGD,
        "adagrad": tpu.Adagrad,
        "adam": tpu.Adam,
        "ftrl": tpu.FTRL,
    }
    if name.lower() not in rules:
        raise ValueError(
            f"--optimizer must be one of {', '.join(rules)} for tables. "
            f"Received: {name!r}."
        )
    return rules[name.lower()]()


def main(arguments: Sequence[str]) -> int:
    """Prints the plan of a model and returns the exit status.

    The status is 1 if no plan fits or if an argument is invalid.
    """
    options = read_arguments(arguments)
    mesh = options.mesh or (
        {"model": options.devices} if options.devices is not None else None
    )
    # The probe measures collectives on logical devices, whose number must be
    # set before TensorFlow starts.
    if mesh is not None:
        _prepare_devices(math.prod(mesh.values()))
    from tf_layoutmap.planning import planner

    try:
        function = find_function(options.model)
        pins = read_pins(options.pin)
    except ValueError as error:
        return failed(error)
    # Errors of the function have a traceback.
    model = function()
    try:
        _check_options(model, options, mesh)
        optimizer = options.optimizer
        if optimizer is not None and mesh is None:
            optimizer = _table_optimizer(optimizer)
        plan = planner.plan(
            model,
            mesh=mesh,
            num_servers=options.num_servers,
            num_workers=options.num_workers,
            memory=options.memory,
            batch_size=options.batch_size,
            optimizer=optimizer,
            pins=pins,
        )
        reasons = [plan.explain(name) for name in options.explain]
    except (TypeError, ValueError) as error:
        return failed(error)
    plan.print()
    for reason in reasons:
        print(reason)
    try:
        if options.json:
            text = json.dumps(plan.to_dict(), indent=1)
            files.write_text(options.json, text)
        if options.html:
            plan.save_html(options.html)
    except OSError as error:
        return failed(error)
    return 0


def failed(error: Exception) -> int:
    """Prints an error to stderr; returns the exit status 1."""
    print(error, file=sys.stderr)
    return 1

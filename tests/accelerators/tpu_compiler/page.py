"""Writes the results of compilations to docs/tpu_compilation.md.

The section "Results" of the page is generated, the text before it is not.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PAGE = pathlib.Path(__file__).parents[3] / "docs/tpu_compilation.md"
HEADING = "\n## Results\n"
# The parts of the memory of a plan, by what they are in a compiled function.
_VARIABLES = ("weights", "slot variables", "other variables")
_TEMPORARIES = ("gradients", "activations")


@dataclasses.dataclass(frozen=True)
class Function:
    """A compiled function.

    Attributes:
      name: For example `"train"`.
      facts: The facts that `lowering` and `compiling` have written.
    """

    name: str
    facts: Mapping[str, Any]

    def error(self, topology: str) -> str | None:
        """Returns why the function was not compiled, or None."""
        if "error" in self.facts:
            return self.facts["error"]
        return self.facts["compiled"][topology].get("error")

    def size(self, topology: str, part: str) -> str:
        """Returns a number of KiB of a device, or a dash after an error."""
        if self.error(topology) is not None:
            return "-"
        return kib(self.facts["compiled"][topology][part])


@dataclasses.dataclass(frozen=True)
class Model:
    """The results of a model.

    Attributes:
      name: Name of the model.
      memory: Planned bytes of a device, by part.
      choices: Name of the planned layout, by item.
      functions: The functions of the model.
    """

    name: str
    memory: Mapping[str, int]
    choices: Mapping[str, str]
    functions: Sequence[Function]

    def planned(self, parts: Iterable[str]) -> int:
        return sum(self.memory.get(part, 0) for part in parts)


def read(name: str, folder: pathlib.Path) -> Model:
    """Returns the results that the programs have written to a folder."""
    case = json.loads((folder / "case.json").read_text())
    return Model(
        name,
        case["memory"],
        case["choices"],
        [
            Function(title, json.loads((folder / f"{number}.json").read_text()))
            for number, title in enumerate(case["functions"])
        ],
    )


def kib(num_bytes: int) -> str:
    """Returns a number of bytes in KiB.

    >>> kib(5_000_000), kib(12)
    ('4,883', '0.012')
    """
    if num_bytes > 1024:
        return f"{num_bytes / 1024:,.0f}"
    return f"{num_bytes / 1024:.2g}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of Markdown.

    >>> print(table(["a", "b"], [["1", "2|3"]]))
    | a | b |
    |---|---|
    | 1 | 2\\|3 |
    """
    cells = [[one.replace("|", "\\|") for one in row] for row in rows]
    return "\n".join(
        [
            f"| {' | '.join(header)} |",
            "|---" * len(header) + "|",
            *(f"| {' | '.join(row)} |" for row in cells),
        ]
    )


def failures(models: Sequence[Model], topologies: Sequence[str]) -> list[str]:
    """Returns a line for each function that was not compiled."""
    return [
        f"{model.name}, {function.name}, {topology}: {error}"
        for model in models
        for function in model.functions
        for topology in topologies
        if (error := function.error(topology)) is not None
    ]


def sparse_core_parts(by_topology: Mapping[str, Model]) -> list[str]:
    """Returns the paragraphs about the ops of SparseCores.

    Args:
      by_topology: The compiled ops of each TPU, in the same order.
    """
    functions = {one: model.functions for one, model in by_topology.items()}
    rows = [
        [
            f"`{of_op[0].name}`",
            *("no" if "error" in one.facts else "yes" for one in of_op),
            *(
                "no" if one.error(topology) else "yes"
                for topology, one in zip(functions, of_op, strict=True)
            ),
            *(
                one.size(topology, "temporaries")
                for topology, one in zip(functions, of_op, strict=True)
            ),
        ]
        for of_op in zip(*functions.values(), strict=True)
    ]
    errors = dict.fromkeys(
        f"{topology}: {error.splitlines()[0]}"
        for topology, of_topology in functions.items()
        for one in of_topology
        if (error := one.error(topology)) is not None
    )
    return [
        "### Ops of SparseCores",
        "tensorflow-tpu converts the ops to StableHLO, and the libtpu above "
        "compiles them. The last columns contain the temporary memory in KiB.",
        table(
            [
                "op",
                *(f"StableHLO, {one}" for one in functions),
                *(f"compiled, {one}" for one in functions),
                *(f"memory, {one}" for one in functions),
            ],
            rows,
        ),
        *(["Errors:", "\n".join(f"- {one}" for one in errors)] * bool(errors)),
    ]


def section(
    models: Sequence[Model],
    topologies: Sequence[str],
    versions: str,
    sparse_cores: Mapping[str, Model],
) -> str:
    """Returns the section "Results".

    Args:
      models: The results.
      topologies: The TPUs.
      versions: The versions of the packages, for example `"jax 0.10.2"`.
      sparse_cores: The results of the ops of SparseCores, by TPU. If the value
        is empty, the section does not contain them.
    """
    pairs = [(m, f) for m in models for f in m.functions]
    count = sum(
        all(f.error(one) is None for one in topologies) for _, f in pairs
    )
    compiled = [
        [
            model.name,
            function.name,
            f"{function.facts.get('nodes', 0):,}",
            f"{function.facts.get('collectives', 0):,}",
            str(function.facts.get("int64_collectives", 0)),
            *(
                "yes" if function.error(one) is None else "no"
                for one in topologies
            ),
        ]
        for model, function in pairs
    ]
    arguments = [
        [
            model.name,
            function.name,
            kib(model.planned(_VARIABLES)) if function.name == "train" else "",
            kib(function.facts.get("variable_bytes", 0)),
            kib(function.facts.get("input_bytes", 0)),
            *(function.size(one, "arguments") for one in topologies),
        ]
        for model, function in pairs
    ]
    temporaries = [
        [
            model.name,
            function.name,
            *(
                [kib(model.planned([part])) for part in _TEMPORARIES]
                if function.name == "train"
                else [""] * len(_TEMPORARIES)
            ),
            *(function.size(one, "temporaries") for one in topologies),
        ]
        for model, function in pairs
    ]
    layouts = [
        [
            model.name,
            "; ".join(
                f"`{item}`: {choice}" for item, choice in model.choices.items()
            ),
        ]
        for model in models
    ]
    failed = failures(models, topologies)
    parts = [
        f"{count} of {len(pairs)} functions were compiled for "
        f"{', '.join(topologies)}. Versions: {versions}.",
        table(
            [
                "model",
                "function",
                "operations",
                "all-reduces",
                "of int64",
                *topologies,
            ],
            compiled,
        ),
        *(["Errors:", "\n".join(f"- {one}" for one in failed)] * bool(failed)),
        "### Arguments of a device in KiB",
        table(
            [
                "model",
                "function",
                "variables, planned",
                "variables",
                "inputs",
                *topologies,
            ],
            arguments,
        ),
        "### Temporary memory of a device in KiB",
        table(
            [
                "model",
                "function",
                *(f"{part}, planned" for part in _TEMPORARIES),
                *topologies,
            ],
            temporaries,
        ),
        "### Planned layouts",
        table(["model", "layouts"], layouts),
        *(sparse_core_parts(sparse_cores) if sparse_cores else []),
    ]
    return "\n\n".join(parts) + "\n"


def with_section(page: str, text: str) -> str:
    """Returns a page with another section "Results".

    >>> with_section(f"Text\\n{HEADING}\\nold\\n", "new\\n")
    'Text\\n\\n## Results\\n\\nnew\\n'

    Raises:
      ValueError: If the page has no section "Results".
    """
    before, found, _ = page.partition(HEADING)
    if not found:
        raise ValueError(f"The page must have the heading {HEADING.strip()!r}.")
    return f"{before}{found}\n{text}"

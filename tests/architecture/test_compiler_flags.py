"""All native code rounds each product and each sum separately.

With fused multiply-add, results would differ in the last bit between
instruction sets, and between x86-64 and aarch64. By default, GCC fuses on
aarch64.
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
FILES = [
    path
    for pattern in ("BUILD", "*.bzl")
    for path in sorted((ROOT / "cc").rglob(pattern))
]
RULES = {"cc_binary", "cc_library", "cc_test"}


def calls_of(path):
    """Yields each rule with its arguments; Starlark is a subset of Python."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node, {one.arg: one.value for one in node.keywords}


def names_in(node):
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def test_each_target_with_sources_uses_the_common_flags():
    found, offenders = 0, []
    for path in FILES:
        for call, arguments in calls_of(path):
            if call.func.id not in RULES or "srcs" not in arguments:
                continue
            found += 1
            flags = arguments.get("copts")
            if flags is None or not names_in(flags) & {"COPTS", "TF_COPTS"}:
                offenders.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert found > 10
    assert not offenders


def test_the_common_flags_disable_fused_multiply_add():
    text = (ROOT / "cc/copts.bzl").read_text(encoding="utf-8")
    assert re.search(r'^COPTS = \[\n    "-ffp-contract=off",$', text, re.M)
    assert re.search(r"^TF_COPTS = COPTS \+ ", text, re.M)


def test_no_file_enables_arithmetic_that_changes_results():
    unsafe = re.compile(
        r"-ffp-contract=(?!off)|-ffast-math|-Ofast|-funsafe-math|"
        r"-fassociative-math|-ffinite-math|fp_contract|optimize\(",
        re.I,
    )
    sources = [*FILES, ROOT / ".bazelrc"]
    sources += [ROOT / "third_party/aarch64/toolchain.bzl"]
    sources += [*(ROOT / "cc").rglob("*.h"), *(ROOT / "cc").rglob("*.cc")]
    assert [one for one in sources if unsafe.search(one.read_text())] == []

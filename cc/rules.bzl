"""Rules that several BUILD files of the native code share."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")
load(
    "//cc:copts.bzl",
    "COPTS",
    "LIBRARY_LINKOPTS",
    "TF_COPTS",
    "TF_LIBRARY",
    "TF_LINKOPTS",
)

def unit_tests(deps):
    """Defines one test per *_test.cc, and `test_headers` with shared helpers.

    For example, the target of cc/core/rows/route_test.cc is
    //cc/core:rows/route_test. GoogleTest must be installed on the system
    (libgtest-dev).

    Args:
      deps: Libraries under test, and test helpers of other packages.
    """
    cc_library(
        name = "test_headers",
        testonly = True,
        hdrs = native.glob(["**/*_test.h"]),
        deps = deps,
    )
    for source in native.glob(["**/*_test.cc"]):
        cc_test(
            name = source[:-len(".cc")],
            size = "small",
            srcs = [source],
            copts = COPTS,
            linkopts = [
                "-lgtest_main",
                "-lgtest",
                "-pthread",
            ],
            deps = deps + [":test_headers"],
        )

def op_library(name, srcs, deps):
    """Defines a shared library with kernels that TensorFlow loads.

    Args:
      name: File name of the library, with .so.
      srcs: Sources of the kernels.
      deps: All dependencies except TensorFlow.
    """
    cc_binary(
        name = name,
        srcs = srcs,
        additional_linker_inputs = [TF_LIBRARY],
        copts = TF_COPTS,
        linkopts = TF_LINKOPTS,
        linkshared = True,
        deps = deps + [
            "//cc:glibc_compat",
            "@pip_deps//:tf",
        ],
    )

def python_module(name, module, srcs, deps, copts = [], linkopts = [], tags = []):
    """Defines a Python module written in C++.

    Args:
      name: Name of the target.
      module: File name of the module, with the suffix that Python requires.
      srcs: Sources; one of them contains PYBIND11_MODULE.
      deps: All dependencies except pybind11.
      copts: Compiler flags in addition to the flags of all native code.
      linkopts: Linker flags in addition to the flags of all libraries.
      tags: Tags of both targets.
    """
    cc_binary(
        name = module,
        srcs = srcs,
        copts = COPTS + ["-fvisibility=hidden"] + copts,
        linkopts = LIBRARY_LINKOPTS + linkopts,
        linkshared = True,
        tags = tags,
        deps = deps + [
            "//cc:glibc_compat",
            "@pip_deps//:pybind11",
        ],
    )
    native.alias(
        name = name,
        actual = module,
        tags = tags,
    )

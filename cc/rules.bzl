"""What several BUILD files of the native parts have in common."""

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
    """One test per *_test.cc, and `test_headers` with the helpers they share.

    cc/core/rows/route_test.cc is //cc/core:rows/route_test. GoogleTest comes
    from the system (libgtest-dev).

    Args:
      deps: What all of them test, and helpers of other packages.
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
    """A shared library with kernels, which TensorFlow loads.

    Args:
      name: Its file name, with .so.
      srcs: Its kernels.
      deps: All but TensorFlow.
    """
    cc_binary(
        name = name,
        srcs = srcs,
        additional_linker_inputs = [TF_LIBRARY],
        copts = TF_COPTS,
        linkopts = TF_LINKOPTS,
        linkshared = True,
        deps = deps + ["@pip_deps//:tf"],
    )

def python_module(name, module, srcs, deps, copts = [], linkopts = [], tags = []):
    """A Python module in C++.

    Args:
      name: What the target is called.
      module: Its file name, with the suffix that Python wants.
      srcs: One of them has PYBIND11_MODULE.
      deps: All but pybind11.
      copts: In addition to those of all native parts.
      linkopts: In addition to those of all libraries.
      tags: Of both targets.
    """
    cc_binary(
        name = module,
        srcs = srcs,
        copts = COPTS + ["-fvisibility=hidden"] + copts,
        linkopts = LIBRARY_LINKOPTS + linkopts,
        linkshared = True,
        tags = tags,
        deps = deps + ["@pip_deps//:pybind11"],
    )
    native.alias(
        name = name,
        actual = module,
        tags = tags,
    )

load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

# Bazel passes the folders in `includes` with the option -isystem, so the
# compiler does not print warnings about these headers.

# `hdrs` contains only the folders that the sources of this project include. A
# Bazel server reads every file once, which would take half a minute for all
# 18,000 headers of TensorFlow.
cc_library(
    name = "tf_headers",
    hdrs = glob(
        [
            "tf_include/Eigen/**",
            "tf_include/absl/**/*.h",
            "tf_include/absl/**/*.inc",
            "tf_include/google/protobuf/**/*.h",
            "tf_include/google/protobuf/**/*.inc",
            "tf_include/ml_dtypes/**",
            "tf_include/tensorflow/c/**/*.h",
            "tf_include/tensorflow/core/**/*.h",
            "tf_include/tensorflow/dtensor/**/*.h",
            "tf_include/third_party/**",
            "tf_include/tsl/**/*.h",
            "tf_include/unsupported/Eigen/**",
            "tf_include/xla/*.h",
            "tf_include/xla/tsl/**/*.h",
        ],
        allow_empty = True,
    ),
    defines = [
        "EIGEN_MAX_ALIGN_BYTES=64",
        "_GLIBCXX_USE_CXX11_ABI=1",
    ],
    includes = ["tf_include"],
)

# The comments in cc/copts.bzl explain how this library is linked.
exports_files(["libtensorflow_framework.so.2"])

cc_library(
    name = "tf",
    deps = [":tf_headers"],
)

cc_library(
    name = "python_headers",
    hdrs = glob(
        [
            "python_config/**/*.h",
            "python_include/**/*.h",
        ],
        allow_empty = True,
    ),
    includes = [
        "python_config",
        "python_include",
    ],
)

cc_library(
    name = "pybind11",
    hdrs = glob(["pybind11_include/**/*.h"]),
    includes = ["pybind11_include"],
    deps = [":python_headers"],
)

"""Sphinx configuration of the documentation, which `make docs` builds.

The pages are Markdown (MyST) with the theme Furo. Neither the build nor the
built pages download files. Links to TensorFlow, Keras and NumPy come from the
lists in `docs/inventories`.
"""

import os
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]
# The API pages import the package. TensorFlow's start-up messages are not
# useful in the output of the build.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Jupyter kernels import the package from this checkout, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])
)

import tf_layoutmap  # noqa: E402

project = "tf_layoutmap"
version = release = tf_layoutmap.__version__
author = "the tf_layoutmap authors"
language = "en"

extensions = [
    # Reads all pages with MyST, and runs the code cells of the tutorials.
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "api_links",
    "docstring_markdown",
    "inventories",
    "no_network",
    "public_names",
    "replaced_names",
]
source_suffix = {".md": "myst-nb"}
exclude_patterns = ["_ext", "_static"]

# Sphinx reports broken links to pages, headings and {py:obj} names as
# warnings, and `make docs` treats each warning as an error.
nitpicky = True
# Types in signatures do not need an API entry, because many of them belong to
# TensorFlow or are private.
nitpick_ignore_regex = [("py:(class|data|exc)", ".*")]
# A type in a signature can be the name of several public classes, such as
# `LayoutMap`.
suppress_warnings = ["ref.python"]
myst_heading_anchors = 3

# Each build runs the tutorials and fails if a cell raises an error.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 120
# TensorFlow writes its start-up messages to standard error.
nb_output_stderr = "remove"

# API entries list members in source order, because source files begin with
# the members that are used most.
autodoc_member_order = "bysource"
# The docstring of the constructor describes the arguments of a class.
autoclass_content = "both"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 76
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Yields", "returns_style")]

html_theme = "furo"
html_title = f"tf_layoutmap {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sourcelink = False
# Language of code blocks that do not name one.
highlight_language = "none"
pygments_style = "friendly"
pygments_dark_style = "monokai"

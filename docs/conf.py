"""How Sphinx builds the documentation; it needs no network."""

import inspect
from typing import Any

import datamat
from docutils.nodes import Element
from sphinx.application import Sphinx
from sphinx.domains.python import PyXRefRole
from sphinx.environment import BuildEnvironment
from sphinx.util.inspect import stringify_signature

project = "datamat"
author = "the datamat authors"
release = version = datamat.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"datamat {version}"

default_role = "py:name"  # docstrings have code in single backticks

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False


class Name(PyXRefRole):
    """Code; where it is the name of something in the reference, a link to it."""

    def process_link(
        self,
        env: BuildEnvironment,
        refnode: Element,
        has_explicit_title: bool,
        title: str,
        target: str,
    ) -> tuple[str, str]:
        if not all(map(str.isidentifier, target.split("."))):
            return title, target  # other code
        if target.isidentifier() and target[0].isupper():
            target = f".{target}"  # a class, of whichever module
        title, target = super().process_link(
            env, refnode, has_explicit_title, title, target
        )
        refnode["reftype"] = "obj"
        return title, target


def show_init(
    _app: Sphinx,
    _what: str,
    _name: str,
    thing: Any,
    _options: Any,
    signature: str,
    _returns: str,
) -> Any:
    """Show what a writer takes: its `__new__`, which says what a subclass lacks, takes anything."""
    if signature is None or not signature.startswith("(*_args"):
        return None
    if thing.__init__ is object.__init__:
        return "()", None
    made = inspect.signature(thing.__init__)
    return stringify_signature(
        made.replace(parameters=list(made.parameters.values())[1:])
    ), None


def setup(app: Sphinx) -> None:
    """Add the role of code in docstrings, and the signatures of writers."""
    app.add_role_to_domain("py", "name", Name())
    app.connect("autodoc-process-signature", show_init)

"""Settings of the documentation."""

import os
from importlib.metadata import version as installed_version

project = "lightning-cnnpar"
author = "the authors of lightning-cnnpar"
copyright = author
release = version = installed_version("lightning-cnnpar")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "lightning-cnnpar"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Links into the documentation of other projects need their indexes, so only builds that may fetch them have links.
if os.environ.get("DOCS_LINKS") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "lightning": ("https://lightning.ai/docs/pytorch/stable", None),
    }

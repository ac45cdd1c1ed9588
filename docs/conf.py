"""Configure Sphinx: MyST pages, executed notebooks, an API reference from docstrings."""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_site"))

import inventory  # noqa: E402 (docs/_site/inventory.py)

import lightning_unified  # noqa: E402

project = "Lightning Unified"
author = "the authors of Lightning Unified"
html_title = project
root_doc = "index"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "directives",  # docs/_site/directives.py
]
exclude_patterns = ["_build", "_site", "jupyter_execute", "**/.ipynb_checkpoints"]
# A page of decisions shows the records of its folder.
exclude_patterns += [
    str(path.relative_to(HERE)) for path in (HERE / "decisions").rglob("*.md") if path.name != "index.md"
]
html_theme = "furo"
html_theme_options = {"light_css_variables": {"color-code-background": "#f5f6f8"}}
html_static_path = ["_site/static"]
html_css_files = ["manual.css"]
html_favicon = "_site/static/favicon.svg"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4  # links to #sections work as they do on a code host
nb_execution_mode = "off"  # a script executes the notebooks and commits their outputs
nb_merge_streams = True

default_role = "code"  # `x` in a docstring is code, as in Markdown
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False  # hooks of Lightning are described there
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True

nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"lightning_unified\..*"),  # types that are not public have no entry
]

# No page of these projects is downloaded: the names and addresses used are kept by hand, and nobody checks them.
_inventories = Path(tempfile.mkdtemp(prefix="inventories"))
intersphinx_mapping = inventory.written(HERE / "_site" / "inventory.txt", _inventories)
intersphinx_timeout = 1

copybutton_prompt_text = "$ "
version = release = lightning_unified.__version__ if hasattr(lightning_unified, "__version__") else ""

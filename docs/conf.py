"""The configuration of the site, which ``make docs`` builds in ``build/site``."""

import os
import pathlib
import sys

from mpmd.version import __version__

sys.path.insert(0, str(pathlib.Path(__file__).parent / "_extensions"))

project = "mpmd"
author = "the authors of mpmd"
copyright = author
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "architecture_pages",
    "command_help",
    "docstring_sections",
]
exclude_patterns = ["_extensions", "_static"]

html_theme = "sphinx_book_theme"
html_title = f"mpmd {release}"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "home_page_in_toc": True,
    "navbar_persistent": [],  # the sidebar has the search
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}

if version_folder := os.environ.get(
    "SITE_FOLDER"
):  # `publish.py` builds one version of several
    html_theme_options |= {
        "article_header_start": [
            "toggle-primary-sidebar.html",
            "version-switcher.html",
        ],
        "check_switcher": False,  # the file is not there yet
        "switcher": {
            "json_url": "../versions.json",
            "version_match": version_folder,
        },
    }

highlight_language = (
    "none"  # blocks without a language are commands and output
)
myst_heading_anchors = (
    4  # as GitHub names them, so that links work in both places
)

nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings have the types that users need, and signatures stay readable
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_param = (
    False  # which would write the text of several parameters for each
)
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 72

"""What mkdocs does for this site beside its own: pages from outside of docs/, notebooks and formulas.

The README, CONTRIBUTING, CHANGELOG and SECURITY and the pages of results/ and zoo/ stay where readers
of the repository look for them, and links between all pages are written as the repository has them.
The site shows the same files with the links turned into its own. A notebook becomes a page with the
outputs that it has been saved with.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Files of the repository and what they are called in the site.
FRONT_PAGE = "README.md"
OTHER_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE")
DIRECTORIES = ("results", "zoo", "deploy", "examples")
SHOWN = ("*.md", "*.png", "*.svg", "*.csv", "*.json", "*.jsonl", "*.yaml", "*.py", "*.sh")
_LINK = re.compile(r"(\]\(|(?:src|href)=\")(?!\w+:|#|/)([^)#\"\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Draw blocks of the language `math`, so that no script has to do it in the browser."""
    fence = {"name": "math", "class": "math", "format": _formula}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def _formula(source: str, *_: Any, **__: Any) -> str:
    formula, drawn = " ".join(source.split()), BytesIO()
    with rc_context({"mathtext.fontset": "stix", "svg.hashsalt": formula}):
        math_to_image(f"${formula}$", drawn, prop=FontProperties(size=13), format="svg")
    # Without its header and its white background, and in the colour of the text.
    unwanted = r"\A.*?(?=<svg)|<metadata>.*?</metadata>|<g id=\"patch_1\">.*?</g>|<!--.*?-->"
    svg = re.sub(unwanted, "", drawn.getvalue().decode(), flags=re.DOTALL)
    label = f'role="img" aria-label="{html.escape(formula)}" fill="currentColor"'
    return f'<div class="math">{svg.replace("<svg", f"<svg {label}", 1)}</div>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/ and those of notebooks."""
    found = [ROOT / name for name in (FRONT_PAGE, *OTHER_PAGES)]
    found += [path for name in DIRECTORIES for shown in SHOWN for path in (ROOT / name).rglob(shown)]
    for path in found:
        source = path.relative_to(ROOT).as_posix()
        files.append(_file(config, _in_site(source), abs_src_path=str(path)))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        cells = json.loads(notebook.content_string)["cells"]
        name = notebook.src_uri.replace(".ipynb", ".md")
        files.append(_file(config, name, content="\n\n".join(_lines(cells))))
    return files


def _file(config: MkDocsConfig, source: str, **content: str) -> File:
    # Not all pages of these directories are in the navigation.
    return File.generated(config, source, inclusion=InclusionLevel.NOT_IN_NAV, **content)


def _in_site(source: str) -> str:
    """Return the name in the site of a file of the repository."""
    source = source.replace(".ipynb", ".md")
    return "index.md" if source == FRONT_PAGE else source.removeprefix("docs/")


def _in_repository(name: str) -> str:
    """Invert `_in_site`."""
    if name == "index.md":
        return FRONT_PAGE
    outside = name.split("/")[0] in DIRECTORIES or name in OTHER_PAGES
    return name if outside else f"docs/{name}"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite the links that are meant for the repository."""
    here = page.file.src_uri
    directory = posixpath.dirname(_in_repository(here))

    def rewrite(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(directory, match[2]))
        is_outside = target.split("/")[0] in DIRECTORIES
        if is_outside and "." not in posixpath.basename(target):
            target += "/README.md"  # The repository shows it for its directory.
        return match[1] + posixpath.relpath(_in_site(target), posixpath.dirname(here) or ".")

    return _LINK.sub(rewrite, markdown)


def _lines(cells: list[dict[str, Any]]) -> Iterator[str]:
    """Write the cells of a notebook as Markdown."""
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
        elif source:
            yield f"```python\n{source}\n```"
        for output in cell.get("outputs", ()):
            if output.get("name") != "stderr":
                yield _output(output)


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        image = "".join(data["image/png"]).replace("\n", "")
        return f'<img alt="output of the cell above" src="data:image/png;base64,{image}">'
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f'<pre class="output">{html.escape(text)}</pre>'

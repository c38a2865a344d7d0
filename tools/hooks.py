"""MkDocs hooks: generated pages and tables, and links out of the documentation."""

from __future__ import annotations

import posixpath
import re
from typing import Any

import pages
import tables

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_NAME = re.compile(r"(?<!\[)`([a-z0-9-]+)`(?!\])")


def on_config(config: Any) -> Any:
    """Add all registered methods to the navigation."""
    for entry in config.nav:
        if "Methods" in entry:
            entry["Methods"] = pages.nav()
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in pages.pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Put in tables; links out of ``docs`` lead to the repository, if one is configured."""
    markdown = tables.filled(markdown)
    here = posixpath.dirname(page.file.src_uri)
    methods = set(pages.stage_names())

    def outside(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(here, target))
        if ":" in target or not path.startswith("../"):
            return match[0]
        path = path.removeprefix("../")
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{path}{anchor})"
        return f"`{path}`" if text.startswith("`") else f"{text} (`{path}`)"

    def named(line: str) -> str:
        """Link method names in the first cell of a table row to their pages."""
        if not line.startswith("| `") or here in ("methods", "results"):
            return line
        start = posixpath.relpath("methods", here or ".")
        cell, bar, rest = line[2:].partition(" |")
        link = _NAME.sub(
            lambda m: f"[{m[0]}]({start}/{m[1]}.md)" if m[1] in methods else m[0], cell
        )
        return f"| {link}{bar}{rest}"

    return "\n".join(map(named, _LINK.sub(outside, markdown).split("\n")))

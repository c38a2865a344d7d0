"""Metadata of the package that depends on where it is published: README and URLs.

A package index shows README without the repository, so its relative links would break there. With
``VLMFAST_REPOSITORY=https://host/owner/name`` at build time they become links to the files of this
version in that repository, and ``Project-URL`` entries are added. Without it, relative links become
plain text and images of the repository are dropped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "VLMFAST_REPOSITORY"
_FENCE = re.compile(r"^(```+|~~~+).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
_DEFINITION = re.compile(r"^ {0,3}\[([^\]\n]+)\]: *(\S+)[^\n]*\n?", re.MULTILINE)
_REFERENCE = re.compile(r"(`+[^`]+`+)|\[([^\[\]]+)\](?:\[([^\[\]]*)\])?(?![(\[:])")
_LINK = re.compile(
    r"(?P<code>(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`))"
    r"|(?P<image>!?)\[(?P<label>(?:[^\[\]`]|`[^`]*`|!?\[[^\[\]]*\](?:\([^()]*\))?)*)\]"
    r"\(\s*(?P<target>[^()\s]+)(?P<title>\s+\"[^\"]*\")?\s*\)",
    re.DOTALL,
)
_TAG = re.compile(
    r"(?P<before><(?:img|source|a)\b[^>]*?\b(?P<key>src|srcset|href)=\")(?P<target>[^\"]*)"
)
_ANCHOR = re.compile(r"<a\b[^>]*>(.*?)</a>", re.DOTALL)


def version(root: Path) -> str:
    """The version of the package, without importing it."""
    text = (root / "vlmfast" / "version.py").read_text(encoding="utf-8")
    return re.search(r"__version__ = \"([^\"]+)\"", text)[1]


def repository() -> str | None:
    """The address of the repository, from the environment."""
    address = os.environ.get(VARIABLE, "").strip().rstrip("/").removesuffix(".git")
    if address and not re.fullmatch(r"https://[\w.-]+(:\d+)?(/[\w.-]+){2,}", address):
        raise ValueError(f"{VARIABLE}={address} must be of the form https://host/owner/name")
    return address or None


def is_relative(target: str) -> bool:
    """Whether a link works only next to the files of the repository."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:|//", target) is None


def rewritten(text: str, address: str | None, tag: str) -> str:
    """README for a package index.

    Parameters
    ----------
    text : str
        Markdown.
    address : str or None
        Of the repository.
    tag : str
        Of the version in it.
    """
    definitions: dict[str, str] = {}

    def outside(change: Callable[[str], str], text: str) -> str:
        """Apply ``change`` to everything but code blocks."""
        parts, end = [], 0
        for fence in _FENCE.finditer(text):
            parts += [change(text[end : fence.start()]), fence[0]]
            end = fence.end()
        return "".join([*parts, change(text[end:])])

    def define(part: str) -> str:
        definitions.update((m[1].lower(), m[2]) for m in _DEFINITION.finditer(part))
        return _DEFINITION.sub("", part)

    def resolve(match: re.Match[str]) -> str:
        target = definitions.get((match[3] or match[2] or "").lower())
        return match[0] if match[1] or target is None else f"[{match[2]}]({target})"

    def absolute(target: str, image: bool) -> str:
        if target.startswith("#"):
            return f"{address}{target}"
        return f"{address}/{'raw' if image else 'blob'}/{tag}/{target.removeprefix('./')}"

    def link(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        label, target, image = links(match["label"]), match["target"], bool(match["image"])
        if is_relative(target):
            if address is None:
                return "" if image else label
            target = absolute(target, image)
        return f"{match['image']}[{label}]({target}{match['title'] or ''})"

    def links(part: str) -> str:
        return _LINK.sub(link, part)

    def attribute(match: re.Match[str]) -> str:
        target = match["target"]
        if is_relative(target):
            target = absolute(target, match["key"] != "href")
        return match["before"] + target

    def html(part: str) -> str:
        if address is None:
            part = _ANCHOR.sub(lambda m: m[1] if _relative_tag(m[0]) else m[0], part)
            return re.sub(
                r"<(?:img|source)\b[^>]*>", lambda m: "" if _relative_tag(m[0]) else m[0], part
            )
        return _TAG.sub(attribute, part)

    text = outside(define, text)
    text = outside(lambda part: _REFERENCE.sub(resolve, part), text)
    return outside(lambda part: html(links(part)), text)


def _relative_tag(tag: str) -> bool:
    found = _TAG.match(tag)
    return found is not None and is_relative(found["target"])


def urls(address: str, tag: str) -> dict[str, str]:
    """The addresses that a package index lists."""
    return {
        "Source": address,
        "Documentation": f"{address}/tree/{tag}/docs",
        "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


class CustomMetadataHook(MetadataHookInterface):
    """Sets ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        root, address = Path(self.root), repository()
        tag = f"v{version(root)}"
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": rewritten(text, address, tag),
        }
        metadata["urls"] = {} if address is None else urls(address, tag)

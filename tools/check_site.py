"""Check a built site: ``python tools/check_site.py site``.

Checks that every link, resource and ``#anchor`` inside the site exists, and that no page loads a
script, a style sheet, an image or a font from another host. Links to other hosts are not checked.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

# Attributes that a browser fetches without a click.
_FETCHED = {("script", "src"), ("img", "src"), ("img", "srcset"), ("iframe", "src")}
_FETCHED |= {("source", "src"), ("source", "srcset"), ("video", "src"), ("object", "data")}
_FETCHED |= {("div", "data-script")}  # by docs/charts.js
_LINKS = {("a", "href"), ("link", "href"), ("use", "href"), *_FETCHED}
_FETCHING = {"stylesheet", "preload", "prefetch", "icon", "preconnect", "dns-prefetch", "manifest"}
_CSS = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


class Page(HTMLParser):
    """Links, resources and anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self._style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        self._style = tag == "style"
        self.fetched += _css(values.get("style", ""))
        for key in ("href", "src", "srcset", "data", "data-script"):
            if key not in values or (tag, key) not in _LINKS:
                continue
            self.links.append(values[key])
            rel = set(values.get("rel", "").split())
            if (tag, key) in _FETCHED or (tag == "link" and rel & _FETCHING):
                self.fetched.append(values[key])

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        if self._style:
            self.fetched += _css(data)


def _css(text: str) -> list[str]:
    return [one or other for one, other in _CSS.findall(text)]


def outside(link: str) -> bool:
    """Whether a link leads to another host."""
    return link.startswith("//") or re.match(r"(?!data:)[a-z][a-z0-9+.-]*:", link) is not None


def problems(site: Path) -> list[str]:
    """One line for each broken link and each resource from another host."""
    read = {f: Page(f.read_text(encoding="utf-8")) for f in sorted(site.rglob("*.html"))}
    found = [] if read else [f"{site}: no pages"]
    for file, page in read.items():
        name = file.relative_to(site)
        found += [
            f"{name}: loads {link} from another host" for link in page.fetched if outside(link)
        ]
        for link in dict.fromkeys(page.links):
            if outside(link) or link.startswith("data:"):
                continue
            path, anchor = urldefrag(unquote(link))
            path = path.partition("?")[0]
            target = site / path.lstrip("/") if path.startswith("/") else file.parent / path
            target = (file if not path else target).resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                found.append(f"{name}: {link} does not exist")
            elif anchor and target.suffix == ".html" and anchor not in read[target].anchors:
                found.append(f"{name}: {link}: no such anchor")
    for file in sorted(site.rglob("*.css")):
        text = file.read_text(encoding="utf-8")
        for link in _css(text):
            if outside(link):
                found.append(f"{file.relative_to(site)}: loads {link} from another host")
    return found


def main(site: str) -> int:
    """Print the problems and return 1 if there are any."""
    folder = Path(site).resolve()
    found = problems(folder)
    for line in found:
        sys.stderr.write(line + "\n")
    number = len(list(folder.rglob("*.html")))
    sys.stdout.write(f"{number} pages, {len(found)} problems\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

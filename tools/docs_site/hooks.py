"""Hooks of MkDocs that make a site of the repository's pages as they stand, whose links are those of a forge.

A page outside docs/ gets a place in the site (`OUTSIDE`), a file or folder that a page links to is copied or listed,
and links are rewritten to these places. Chinese pages (docs/zh, README.zh-CN.md) become a section of their own.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

PROJECT = Path(__file__).resolve().parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh/index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "slurm/README.md": "slurm-folder.md",
    "tools/bench/README.md": "bench.md",
}
CHINESE = "中文"
# Lines of 120 columns, as commands print them into a pipe, fit beside the navigation.
STYLE = "@media screen and (min-width: 76.25em) { .md-grid { max-width: 88rem } }\n"
_log = logging.getLogger("mkdocs.hooks.pages")
# Code is matched first, so that nothing in it is taken for a link.
_PARTS = re.compile(r"^```.*?^```$|`[^`\n]+`|(!?\[[^]]*\]\()([^)\s]+)(?=\))", re.DOTALL | re.MULTILINE)
_SCHEME = re.compile(r"[a-z]+:")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the Chinese pages to the navigation, in the order of their English counterparts."""
    found = [path for path in OUTSIDE.values() if path.startswith("zh/") and _source(path).exists()]
    found += sorted(f"zh/{path.name}" for path in Path(config.docs_dir, "zh").glob("*.md"))
    order = [page for section in config.nav or [] for page in _pages(section)]
    found.sort(key=lambda page: order.index(page[3:]) if page[3:] in order else len(order))
    if found and config.nav is not None:
        config.nav.append({CHINESE: found})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and what pages link to."""
    for source, place in OUTSIDE.items():
        if (PROJECT / source).exists():
            files.append(File.generated(config, place, abs_src_path=str(PROJECT / source)))
    files.append(File.generated(config, "assets/site.css", content=STYLE))
    places = _places(files)
    for page in list(files.documentation_pages()):
        for target in _targets(page.content_string):
            goal = _goal(page, target)
            if goal in places or not goal.exists():
                continue
            name = f"files/{os.path.relpath(goal, PROJECT)}"
            if goal.is_dir():
                listed = [path for path in sorted(goal.iterdir()) if path.is_file()]
                files.append(_listing(config, name, goal, listed, places))
                places[goal] = f"{name}.md"
            else:
                files.append(File.generated(config, name, abs_src_path=str(goal)))
                places[goal] = name
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page to the places in the site of what they lead to."""
    if page.file.abs_src_path is None:  # a listing, whose links are right
        return markdown
    places = _places(files)

    def rewritten(match: re.Match[str]) -> str:
        before, target = match[1], match[2]
        if not target or _SCHEME.match(target) or target.startswith("#"):
            return match[0]
        goal, anchor = _goal(page.file, target), target.partition("#")[2]
        if goal not in places:
            _log.warning("%s: the link %s leads nowhere", page.file.src_uri, target)
            return match[0]
        place = posixpath.relpath(places[goal], posixpath.dirname(page.file.src_uri) or ".")
        return f"{before}{place}{'#' * bool(anchor)}{anchor}"

    return _PARTS.sub(rewritten, markdown)


def _source(place: str) -> Path:
    """Return the file that has this place in the site."""
    return next(PROJECT / source for source, found in OUTSIDE.items() if found == place)


def _pages(section: object) -> Iterator[str]:
    """Yield the pages of a part of the navigation, in their order."""
    if isinstance(section, dict):
        for part in section.values():
            yield from _pages(part)
    elif isinstance(section, list):
        for part in section:
            yield from _pages(part)
    else:
        yield str(section)


def _targets(markdown: str) -> Iterator[str]:
    """Yield the targets of links to files."""
    for match in _PARTS.finditer(markdown):
        if match[2] and not _SCHEME.match(match[2]) and not match[2].startswith("#"):
            yield match[2]


def _goal(file: File, target: str) -> Path:
    """Return the file or folder in the repository that a link of a page leads to."""
    assert file.abs_src_path is not None
    return (Path(file.abs_src_path).parent / target.partition("#")[0]).resolve()


def _places(files: Files) -> dict[Path, str]:
    """Return the place in the site of every file of the repository that has one, and of every folder that is listed."""
    places = {Path(file.abs_src_path).resolve(): file.src_uri for file in files if file.abs_src_path is not None}
    listed = {PROJECT / file.src_uri[len("files/") : -len(".md")]: file.src_uri for file in files if _is_listing(file)}
    return places | listed


def _is_listing(file: File) -> bool:
    return file.abs_src_path is None and file.src_uri.startswith("files/")


def _listing(config: MkDocsConfig, name: str, folder: Path, listed: list[Path], places: dict[Path, str]) -> File:
    """Return a page that lists the files of a folder."""
    base = posixpath.dirname(name)
    lines = [
        f"- [{path.name}]({posixpath.relpath(places[path], base)})" if path in places else f"- {path.name}"
        for path in listed
    ]
    text = f"# {os.path.relpath(folder, PROJECT)}\n\n" + "\n".join(lines) + "\n"
    return File.generated(config, f"{name}.md", content=text, inclusion=InclusionLevel.NOT_IN_NAV)

"""The documentation builds as a site, strictly: every page is in its navigation, every link and anchor leads somewhere.

It takes ten seconds. It catches a page that nobody can find in the site, a link or anchor that works on a forge only,
Markdown that a forge and the site read differently, and a script, style, font or picture from another host, without
which the site could not be read offline.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests import pages

SITE = "tools/docs_site/mkdocs.yml"
SECTIONS = ["Start", "Use", "Cluster", "Depth", "Trouble", "Project"]
ELEMENTS = ("h1", "h2", "h3", "h4", "p", "li", "tr", "pre", "code", "blockquote", "img", "a", "strong", "em")
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
NO_LOAD = ("canonical", "next", "prev", "alternate")  # kinds of <link> that a browser does not follow by itself


def build(project: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout as the page for contributors says."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(project / SITE), "-d", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    out = tmp_path_factory.mktemp("site") / "out"
    done = build(pages.PROJECT, out)
    assert done.returncode == 0, done.stderr
    return out


def copied(folder: Path) -> Path:
    """A copy of what the site is built from, to plant mistakes in."""
    for name in ("docs", "slurm", "tools/docs_site", "tools/bench"):
        shutil.copytree(pages.PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(pages.PROJECT / "tools" / "second_checkouts.yaml", folder / "tools")
    for path in pages.PROJECT.glob("*.md"):
        shutil.copy(path, folder)
    return folder


def outside() -> dict[str, str]:
    """The pages outside docs/, each with its place in the site."""
    specification = importlib.util.spec_from_file_location("hooks", (pages.PROJECT / SITE).with_name("hooks.py"))
    assert specification is not None and specification.loader is not None
    hooks = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(hooks)
    found: dict[str, str] = hooks.OUTSIDE
    return found


class Loads(HTMLParser):
    """What a browser loads by itself for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in LOADED and not (tag == "link" and given.get("rel") in NO_LOAD):
            self.found.append(given.get(LOADED[tag]) or "")


def from_elsewhere(site: Path) -> list[str]:
    """What pages and styles of the site load from other hosts."""
    found = []
    for path in sorted(site.rglob("*.html")):
        loads = Loads()
        loads.feed(path.read_text("utf-8"))
        found += [f"{path.name}: {one}" for one in loads.found if re.match(r"(https?:)?//", one)]
    for path in sorted(site.rglob("*.css")):
        styles = path.read_text("utf-8")
        given = re.findall(r"""(?:url\(|@import\s+)["']?((?:https?:)?//[^"')]+)""", styles)
        found += [f"{path.name}: {one}" for one in given]
    return found


def elements(html: str) -> Counter[str]:
    """How many elements of each kind a page has; not those that the theme adds."""
    html = re.sub(r'<a class="headerlink".*?</a>', "", html, flags=re.DOTALL)
    found = Counter(re.findall(r"<(\w+)[ >/]", html))
    return Counter({name: found[name] for name in ELEMENTS})


def test_the_sections_are_in_their_order(site: Path) -> None:
    text = (site / "index.html").read_text("utf-8")
    tabs = re.findall(r'md-tabs__link">\s*(.*?)\s*</a>', text)
    assert [name for name in tabs if name in SECTIONS] == SECTIONS


def test_a_forge_and_the_site_read_pages_alike(site: Path) -> None:
    """The renderer of the comparison is CommonMark with tables, which is what forges show."""
    forge = MarkdownIt("commonmark").enable("table")
    docs = pages.PROJECT / "docs"
    places = {page: page.relative_to(docs) for page in docs.rglob("*.md")}
    places |= {
        pages.PROJECT / name: Path(place) for name, place in outside().items() if (pages.PROJECT / name).exists()
    }
    assert len(places) > 35
    for page, place in sorted(places.items()):
        html = (site / place).with_suffix(".html").read_text("utf-8")
        (article,) = re.findall(r"<article[^>]*>(.*?)</article>", html, re.DOTALL)
        assert elements(article) == elements(forge.render(page.read_text("utf-8"))), page.name


def test_every_page_of_the_repository_is_in_the_site() -> None:
    docs = {pages.name_of(page) for page in pages.PAGES if not pages.name_of(page).startswith("docs/")}
    assert docs | {"CHANGELOG.md"} == {name for name in outside() if (pages.PROJECT / name).exists()}


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    assert from_elsewhere(site) == []


def test_planted_loads_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<script src="https://a.example/x.js"></script><img src="x.png"><link rel="icon" href="//b.example/y.css">'
        '<link rel="canonical" href="https://c.example"><a href="https://d.example">d</a>'
    )
    (tmp_path / "b.css").write_text(
        "@import 'https://e.example/f';\n@font-face{src:url(https://g.example/h)} .i{url(j)}"
    )
    assert [line.split(": ")[1] for line in from_elsewhere(tmp_path)] == [
        "https://a.example/x.js",
        "//b.example/y.css",
        "https://e.example/f",
        "https://g.example/h",
    ]
    assert elements("<p>a <code>b</code>") != elements("<p>a b")


def test_planted_mistakes_end_the_build(tmp_path: Path) -> None:
    copy = copied(tmp_path / "copy")
    (copy / "docs" / "lost.md").write_text("# Lost\n")
    with open(copy / "docs" / "gspo.md", "a", encoding="utf-8") as page:
        page.write("\n[a](install.md#no-such-place), [b](nowhere.md), [c](../README.md#commands) and `[d](gone.md)`\n")
    done = build(copy, tmp_path / "out")
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if "WARNING" in line or "lost.md" in line]
    text = "\n".join(told)
    assert "lost.md" in text and "no-such-place" in text and "nowhere.md" in text
    assert "README" not in text and "gone.md" not in text


def test_chinese_pages_get_a_section(tmp_path: Path) -> None:
    """They need no entry in the navigation: it takes them in the order of the English pages."""
    copy = copied(tmp_path / "copy")
    shutil.rmtree(copy / "docs" / "zh", ignore_errors=True)
    (copy / "docs" / "zh").mkdir()
    (copy / "README.zh-CN.md").write_text("# 首页\n\n[安装](docs/zh/install.md) [English](README.md)\n")
    for name, title in {"gspo": "一页", "install": "安装"}.items():
        (copy / "docs" / "zh" / f"{name}.md").write_text(f"# {title}\n\n[x](../{name}.md) [y](../../README.zh-CN.md)\n")
    done = build(copy, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out" / "zh" / "gspo.html").read_text("utf-8")
    assert 'href="index.html">y' in text and 'href="../gspo.html">x' in text
    section = text[text.index("中文") :]
    assert section.index("首页") < section.index("安装") < section.index("一页")

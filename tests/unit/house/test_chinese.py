"""The Chinese pages say what the English ones say: the same commands, configs, figures, names, links and tables.

It takes a second. It catches a command, a figure or a section that was changed on one side only, a page of *Start*
without its translation, a setting or column of the console that the glossary lacks, and slips of typography: a missing
space between Chinese and Latin text, half-width punctuation, a line that breaks within a Chinese sentence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from gspo_hpc.config import schema
from gspo_hpc.runs.console_columns import COLUMNS
from tests import pages
from tests.blocks import REASONS

DOCS = pages.PROJECT / "docs"
README = pages.PROJECT / "README.md"
GLOSSARY = DOCS / "zh" / "glossary.md"  # it has no English page
SITE = (pages.PROJECT / "tools" / "docs_site" / "mkdocs.yml").read_text("utf-8")
START = [
    name for name in re.findall(r"(?m): (\S+\.md)$", SITE.split("- Start:")[1].split("- Use:")[0]) if name != "index.md"
]
TRANSLATED = (*START, "batch-arithmetic.md")  # index.md is the README
PAIRS = [(README, pages.PROJECT / "README.zh-CN.md"), *((DOCS / name, DOCS / "zh" / name) for name in TRANSLATED)]
by_pair = pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=[pages.name_of(one) for one, _ in PAIRS])
by_page = pytest.mark.parametrize("page", [*(one for _, one in PAIRS), GLOSSARY], ids=pages.name_of)

# What stands above a block that is not run by a test.
MARKS = dict(zip(REASONS, ("需要集群", "需要 GPU", "需要联网", "需要几分钟"), strict=True))

HAN = "\u3400-\u9fff"
FULL = "，。；：？！、（）「」《》"
LATIN = "A-Za-z0-9\u0370-\u03ff"
_BLOCK = re.compile(r"(?m)^```(\w*)\n((?:.*\n)*?)```$|(?<=\n\n)((?:    \S.*\n)+)")
_SWITCH = re.compile(r"(?m)^(?:\[English\]\(\S+\) \| 简体中文|English \| \[简体中文\]\(\S+\))$")  # line below the title
_LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")

MONTHS = "January February March April May June July August September October November December".split()
WORDS = "two three four five six seven eight nine ten eleven twelve".split()
HAN_NUMBERS = dict(zip("两三四五六七八九十", "2 3 4 5 6 7 8 9 10".split(), strict=True))
COUNTED = "个条次类种点张倍份行步列项遍"  # what follows a number in Chinese
SCALES = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "万": 1e4, "亿": 1e8}
UNITS = {
    "second": "s|seconds?|秒",
    "minute": "minutes?|分钟",
    "hour": "hours?|小时",
    "byte": "bytes?|字节",
    "percent": "%",
    **{unit: unit for unit in ("ms", "KiB", "MiB", "GiB", "TiB", "MB", "GB", "TB")},
}
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e-?\d+)?")
_FIGURE = re.compile(
    r"(?P<figure>[A-Za-z0-9](?:[\w.,-]*[A-Za-z0-9])?)"  # a number, or a name or a date with digits
    rf"(?: ?(?:{'|'.join(f'(?P<{name}>{words})' for name, words in UNITS.items())})(?![A-Za-z]))?",
    re.ASCII,
)


def figures(text: str) -> Counter[str]:
    """Return the numbers of a text, in digits or as words, with their units and how often each stands there.

    So are dates and names with digits (Qwen3-8B). Left out are ordinals, one, and what stands in backticks.
    """
    text = re.sub(r"`[^`]*`|<!--.*?-->", " ", _LINK.sub(r"\1", text))
    text = re.sub(rf"\b({'|'.join(MONTHS)}) (20\d\d)\b", lambda one: f"{one[2]} {MONTHS.index(one[1]) + 1}", text)
    text = re.sub(rf"(?i)\b({'|'.join(WORDS)})\b", lambda one: str(WORDS.index(one[1].lower()) + 2), text)
    text = re.sub(rf"(?<![第几])([{''.join(HAN_NUMBERS)}])(?=[{COUNTED}])", lambda one: HAN_NUMBERS[one[1]], text)
    text = re.sub(
        rf"(\d+(?:\.\d+)?) ?({'|'.join(SCALES)})", lambda one: f"{round(float(one[1]) * SCALES[one[2]])} ", text
    )
    found: Counter[str] = Counter()
    for one in _FIGURE.finditer(text):
        unit = one.lastgroup if one.lastgroup != "figure" and _NUMBER.fullmatch(one["figure"]) else ""
        if re.search(r"\d", one["figure"]):
            found[f"{one['figure']} {unit}".strip()] += 1
    if halves := len(re.findall(r"(?i)\bhalf\b|一半|半数|半条", text)):
        found["1/2"] = halves
    return found


def sections(text: str) -> list[str]:
    """Return the prose and tables of a page, by its headings."""
    return re.split(r"(?m)^(?=#+ )", _SWITCH.sub("", pages.prose(text)))


def different_figures(english: str, chinese: str) -> list[str]:
    """Return the figures that stand in one of the texts more often than in the other, by the sections of a page."""
    found = []
    for left, right in zip_longest(sections(english), sections(chinese), fillvalue=""):
        one, other = figures(left), figures(right)
        for side, more in (("English", one - other), ("Chinese", other - one)):
            found += [
                f"{side} only: {figure}, in: {(right or left).splitlines()[0]}" for figure in sorted(more.elements())
            ]
    return found


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """Return language and lines of each block of code, also of indented ones."""
    return [(kind or "", (fenced or indented).splitlines()) for kind, fenced, indented in _BLOCK.findall(text)]


def same_line(kind: str, english: str, chinese: str) -> bool:
    """Tell if two lines of code are the same but for a comment, or an explanation behind spaces, in Chinese."""
    han = re.search(f"[{HAN}]", chinese)
    if han is None or kind == "console":
        return english.split() == chinese.split()
    mark = r"\s{2,}|^\s*" if kind == "" else r"(?:^|\s)\s*# "
    begin = list(re.finditer(mark, chinese[: han.start()]))[-1:]
    if not begin:
        return False
    code = r"\s+".join(map(re.escape, chinese[: begin[0].start()].split()))
    found = re.fullmatch(rf"\s*{code}(?:{mark})(\S.*)", english)
    return found is not None and figures(found[1]) == figures(chinese[begin[0].end() :])


def different_blocks(english: str, chinese: str) -> list[str]:
    """Return the lines of blocks that differ; comments may be translated."""
    one, other = blocks(english), blocks(chinese)
    if [(kind, len(lines)) for kind, lines in one] != [(kind, len(lines)) for kind, lines in other]:
        return [f"other blocks, or other lengths: {len(one)} and {len(other)} blocks"]
    return [
        f"{left!r} and {right!r}"
        for (kind, lefts), (_, rights) in zip(one, other, strict=True)
        for left, right in zip(lefts, rights, strict=True)
        if not same_line(kind, left, right)
    ]


def shape(text: str) -> list[str]:
    """Return headings, items of lists, tables by rows and columns, and marks of blocks, in the order of a page."""
    for mark, chinese in MARKS.items():
        text = text.replace(f"*{chinese}：*", f"*{mark}:*")
    lines = pages.prose(text).splitlines()
    marks = (re.match(r"#+ |- |\||\*.+:\*$", line) for line in lines)
    found = [
        f"row of {len(re.sub('`[^`]*`', '', line).split('|'))}" if mark[0] == "|" else mark[0].strip()
        for line, mark in zip(lines, marks, strict=True)
        if mark
    ]
    return found


def places(page: Path, text: str) -> set[str]:
    """Return what a page links to, without anchors; for a Chinese page its English one."""
    found = set()
    for target in pages.links(_SWITCH.sub("", text)):
        file = target.partition("#")[0]
        if target.startswith("http") or not file:
            found |= {target} if file else set()
            continue
        path = (page.parent / file).resolve()
        if path.parent == DOCS / "zh" and path != GLOSSARY:
            path = DOCS / path.name
        found.add(pages.name_of(path))
    return found


def paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs, items and cells as a browser shows them: line breaks are spaces, code is a Latin letter."""
    text = re.sub(r"<!--.*?-->", "", pages.prose(_SWITCH.sub("", text)))
    text = re.sub(r"\*+", "", _LINK.sub(r"\1", re.sub(r"`[^`]*`", "x", text)))
    for part in re.split(r"\n\s*\n|\n(?=- |\||#)", text):
        joined = " ".join(re.sub(r"^(> |- |#+ )", "", line.strip()) for line in part.strip().splitlines())
        yield from (cell.strip() for cell in (joined.strip("|").split("|") if joined.startswith("|") else [joined]))


def slips(text: str) -> list[str]:
    """Return places where spaces or punctuation are not those of Chinese typography."""
    rules = (
        rf"[{HAN}][{LATIN}]|[{LATIN}%][{HAN}]",  # no space between Chinese and Latin text
        rf"[{HAN}][,.;:?!()]|[,;:?!()][{HAN}]",  # half-width punctuation
        rf" [{FULL}]|[{FULL}] |[{HAN}] [{HAN}]",  # a space, or a line break, where Chinese has none
        r"  ",
    )
    return [
        part[max(0, found.start() - 10) : found.end() + 10]
        for part in paragraphs(text)
        for rule in rules
        for found in re.finditer(rule, part)
    ]


def literal_marks(text: str) -> list[str]:
    """Return the places where ** does not begin or end bold text, because of the punctuation beside it."""
    html = MarkdownIt("commonmark").enable("table").render(text)
    return re.findall(r".{0,10}\*\*.{0,10}", re.sub(r"(?s)<code.*?</code>", "", html))


@by_pair
def test_commands_and_configs_are_the_same(english: Path, chinese: Path) -> None:
    assert different_blocks(english.read_text("utf-8"), chinese.read_text("utf-8")) == []


@by_pair
def test_figures_are_the_same(english: Path, chinese: Path) -> None:
    assert different_figures(english.read_text("utf-8"), chinese.read_text("utf-8")) == []


@by_pair
def test_names_in_backticks_are_the_same(english: Path, chinese: Path) -> None:
    one, other = (set(pages.spans(page.read_text("utf-8"))) for page in (english, chinese))
    assert (sorted(one - other), sorted(other - one)) == ([], [])


@by_pair
def test_sections_lists_and_tables_have_the_same_shape(english: Path, chinese: Path) -> None:
    assert shape(chinese.read_text("utf-8")) == shape(english.read_text("utf-8"))


@by_pair
def test_links_lead_to_the_same_places_in_chinese_where_there_is_a_page(english: Path, chinese: Path) -> None:
    text = chinese.read_text("utf-8")
    one, other = places(english, english.read_text("utf-8")), places(chinese, text)
    own = {pages.name_of(page) for page in (*(page for page, _ in PAIRS), GLOSSARY)}
    assert (sorted(one - other), sorted(other - one - own)) == ([], [])
    reached = {(chinese.parent / target.partition("#")[0]).resolve() for target in pages.links(_SWITCH.sub("", text))}
    assert reached & {page for page, _ in PAIRS} == set()


@by_pair
def test_a_chinese_page_leads_to_its_english_page(english: Path, chinese: Path) -> None:
    (switch,) = _SWITCH.findall(chinese.read_text("utf-8"))
    (target,) = pages.links(switch)
    assert (chinese.parent / target).resolve() == english


def test_the_readmes_lead_to_each_other_and_to_all_chinese_pages() -> None:
    assert _SWITCH.findall(README.read_text("utf-8")) == ["English | [简体中文](README.zh-CN.md)"]
    linked = set(pages.links(PAIRS[0][1].read_text("utf-8")))
    assert [name for name in sorted((DOCS / "zh").glob("*.md")) if f"docs/zh/{name.name}" not in linked] == []


def test_every_page_of_start_is_translated_and_no_other_page_is_alone() -> None:
    assert sorted(path.name for path in (DOCS / "zh").iterdir()) == sorted((*TRANSLATED, GLOSSARY.name))
    assert len(START) >= 3 and [name for name in TRANSLATED if not (DOCS / name).exists()] == []


@by_page
def test_typography(page: Path) -> None:
    text = page.read_text("utf-8")
    assert (slips(text), literal_marks(text)) == ([], [])


def glossary(heading: str) -> list[str]:
    """Return the first cells of the table below a heading of the glossary."""
    section = GLOSSARY.read_text("utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"(?m)^\| (.*?) \|", section)[1:]


def test_the_glossary_has_the_settings_that_chinese_pages_name() -> None:
    kept = {key for cell in glossary("设置项") for key in re.findall(r"`([^`]+)`", cell)}
    assert kept <= set(schema.keys()) | {"algorithm.clip_low", "algorithm.clip_high", "algorithm.kl_beta"}
    text = "\n".join(page.read_text("utf-8") for _, page in PAIRS)
    named = set(re.findall(rf"(?<![\w/.])(?:{'|'.join(schema.Config.model_fields)})\.[a-z_]+(?![\w./])", text))
    assert len(named) > 30 and sorted((named & set(schema.keys())) - kept) == []


def test_the_glossary_has_the_columns_of_the_console_and_no_metric_that_is_gone() -> None:
    assert glossary("控制台各列") == [column.title for column in COLUMNS]
    names = [name for cell in glossary("`metrics.jsonl` 里的指标") for name in re.findall(r"`([^`]+)`", cell)]
    source = "".join(path.read_text("utf-8") for path in (pages.PROJECT / "gspo_hpc").rglob("*.py"))
    assert len(names) > 20 and [name for name in names if f'"{name}"' not in source and name != "reward/NAME"] == []
    shown = {name for column in COLUMNS for name in re.findall(r"\((\w+)\)", column.meaning)}
    assert shown - set(names) == {"seconds"}


ENGLISH = """# A page

English | [简体中文](zh.md)

It takes 73 s and 1.5 GiB (two cores, November 2026), or 95 % of it with Python 3.11; half is kept. 0.4 million rows.

```bash
gspo-hpc plan a.yaml batch.num_generations=4     # plan 4 of them
```

```
gspo-hpc plan CONFIG [--json]    shows 3 sizes
```

    max_steps = N x G

| a | b |
|---|---|
| `x` | 2,000 files |
"""
CHINESE = """# 页面

[English](a.md) | 简体中文

用时 73 秒，占 1.5 GiB，用了两个核（2026 年 11 月）；在 Python 3.11 下是其中的 95%；保留一半。共 40 万行。

```bash
gspo-hpc plan a.yaml batch.num_generations=4   # 规划其中 4 个
```

```
gspo-hpc plan CONFIG [--json]   显示 3 个大小
```

    max_steps = N x G

| a | b |
|---|---|
| `x` | 2,000 个文件 |
"""


def test_a_translation_without_mistakes_passes() -> None:
    assert different_blocks(ENGLISH, CHINESE) == different_figures(ENGLISH, CHINESE) == slips(CHINESE) == []
    assert shape(ENGLISH) == shape(CHINESE)


@pytest.mark.parametrize(
    ("check", "old", "new"),
    [
        *((different_figures, *pair) for pair in (("73 s", "74 s"), ("73 s", "73 minutes"), ("1.5 GiB", "1.5 GB"))),
        *((different_figures, *pair) for pair in (("95 %", "96 %"), ("3.11", "3.12"), ("2,000", "2,001"))),
        *(
            (different_figures, *pair)
            for pair in (("two", "four"), ("November", "October"), ("0.4 m", "0.5 m"), ("half is", "all is"))
        ),
        *((different_blocks, *pair) for pair in (("s=4", "s=8"), ("plan 4", "plan 5"), ("     # plan 4 of them", ""))),
        *((different_blocks, *pair) for pair in (("--json", "--jsonl"), ("son]", "son] [-x]"), ("3 sizes", "4 sizes"))),
        *((different_blocks, *pair) for pair in (("N x G", "N x H"), ("```bash", "```yaml"))),
    ],
)
def test_a_change_of_the_english_page_alone_is_found(
    check: Callable[[str, str], list[str]], old: str, new: str
) -> None:
    assert old in ENGLISH and check(ENGLISH.replace(old, new), CHINESE) != []


def test_a_figure_in_another_section_is_found() -> None:
    assert different_figures("# A\n\n3 s\n\n## B\n\n4 s\n", "# 甲\n\n4 s\n\n## 乙\n\n3 s\n") == [
        "English only: 3 second, in: # 甲",
        "Chinese only: 4 second, in: # 甲",
        "English only: 4 second, in: ## 乙",
        "Chinese only: 3 second, in: ## 乙",
    ]


def test_planted_slips_are_found() -> None:
    for text in (
        "用GPU 训练",
        "占 95%的显存",
        "训练(CPU)",
        "训练,再评测",
        "训练， 再评测",
        "用 `x`训练",
        "用\n显卡",
        "训练：\n`x`",
    ):
        assert len(slips(text)) >= 1, text
    assert literal_marks("**现状。**没有") != [] and literal_marks("**现状**：`**`没有") == []

"""The report in a real browser: on a phone, in the dark, on paper, without a script, and down to every token.

It takes half a minute and needs Chromium, which tools/setup_env.sh --dev installs. The tests would catch a page that is
wider than a phone, text too faint to read, what paper cuts off, a page that asks a network for anything or logs an
error, a link of the drill-down that leads nowhere, and a number in the table of tokens that is not the recorded one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_hpc.runs import sample_record
from gspo_hpc.runs.sample_record import RecordedSample
from tests.browser.chromium import Tab
from tests.browser.conftest import STEPS, Pages

MEASURE = (Path(__file__).parent / "measure.js").read_text("utf-8").partition("\n")[2]
NAMES = ("failed", "plain", "step", "compare")
A4 = 718  # pixels of CSS between margins of a centimetre
OPENED = "document.querySelector('.sample[open] .tokens table') !== null"


def opened(tab: Tab, pages: Pages, name: str, **how: object) -> Tab:
    """The page with everything on it unfolded, tokens too."""
    tab.show(pages.all[name], **how)  # type: ignore[arg-type]
    tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    if name == "step":
        tab.until("[...document.querySelectorAll('.tokens')].every((one) => one.querySelector('table'))")
    return tab


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_beyond_the_edge(width: int, name: str, pages: Pages, tab: Tab) -> None:
    assert opened(tab, pages, name, width=width).run(f"{MEASURE}.beyond()") == {"page": 0, "texts": []}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dark", [False, True])
def test_all_text_can_be_read(dark: bool, name: str, pages: Pages, tab: Tab) -> None:
    """Contrast by the definition of WCAG 2, level AA, from the styles that the browser computed."""
    shown = opened(tab, pages, name, dark=dark)
    assert shown.run(f"{MEASURE}.faint()") == []
    assert shown.run(f"{MEASURE}.count()") > 50
    page = shown.run("getComputedStyle(document.body).backgroundColor")
    assert (page == "rgb(20, 23, 27)") == dark


@pytest.mark.parametrize("name", NAMES)
def test_paper_is_white_also_for_whoever_reads_in_the_dark(name: str, pages: Pages, tab: Tab) -> None:
    shown = opened(tab, pages, name, width=A4, media="print", dark=True)
    assert shown.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert shown.run(f"{MEASURE}.faint()") == []


@pytest.mark.parametrize("name", NAMES)
def test_paper_cuts_nothing_off(name: str, pages: Pages, tab: Tab) -> None:
    shown = opened(tab, pages, name, width=A4, media="print")
    assert shown.run(f"{MEASURE}.hiding()") == []
    assert shown.run(f"{MEASURE}.beyond()") == {"page": 0, "texts": []}
    assert shown.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["failed", "plain", "compare"])
def test_labels_of_charts_do_not_overlap(name: str, width: int, pages: Pages, tab: Tab) -> None:
    assert tab.show(pages.all[name], width=width).run(f"{MEASURE}.overlapping()") == []


def recorded(pages: Pages, step: int, slot: int) -> list[RecordedSample]:
    """The samples of a group, as the record has them."""
    (found,) = [one for one in sample_record.steps(pages.run.record) if one.step == step]
    return next(group.samples for group in found.groups if group.slot == slot)


def written(value: float | None, digits: int) -> str:
    """A number as the table has it."""
    return "\u2013" if value is None else f"{value:.{digits}f}".replace("-", "\u2212")


def expected(one: RecordedSample) -> list[list[str]]:
    """The rows of the table of tokens, from the record alone."""
    trainer = one.logprobs if one.old_logprobs is None else one.old_logprobs
    rows = []
    for place, token in enumerate(one.tokens):
        row = [str(place + 1), one.token_texts[place].replace(" ", "\u00b7").replace("\n", "\u21b5") or "\u2205"]
        row += [str(token), written(one.rollout_logprobs[place], 5)]
        for values, digits in ((one.old_logprobs, 5), (one.logprobs, 5), (one.ratios, 6)):
            row += [written(values[place], digits)] if values is not None else []
        if trainer is not None:
            ours, theirs = trainer[place], one.rollout_logprobs[place]
            assert ours is not None and theirs is not None
            row.append(written(ours - theirs, 7))
        rows.append(row)
    return rows


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("width", [390, 1280])
def test_clicks_lead_from_the_run_to_every_token(width: int, slot: int, pages: Pages, tab: Tab) -> None:
    """From the report to a step, to a sample, to its tokens, whose numbers are those of the record; and back."""
    tab.show(pages.all["failed"], width=width)
    links = tab.run("[...document.querySelectorAll('table.steps a')].map((one) => one.textContent)")
    assert links == [str(step) for step in reversed(STEPS)]
    tab.click("table.steps tr:nth-child(2) a")
    tab.until("document.querySelector('h1')?.textContent === 'Step 5' && document.readyState === 'complete'")
    for one in recorded(pages, 5, slot):
        place = f"document.getElementById('g{slot}s{one.index}')"
        tab.click(f"a[href='#g{slot}s{one.index}']")
        tab.until(f"{place}.querySelector('.tokens table') !== null")
        shown = f"{MEASURE}.table({place}.querySelector('.tokens'))"
        assert len(tab.run(shown)) == min(one.length, 200) + 1
        if one.length > 200:
            tab.click(f"#g{slot}s{one.index} .more button:last-child")
        head, *rows = tab.run(shown)
        assert head[:4] == ["#", "Token", "Id", "Engine"] and ("Old policy" in head) == (slot == 1)
        assert ("Ratio" in head) == (one.ratios is not None)
        assert rows == expected(one)
        texts = tab.run(f"[...{place}.querySelectorAll('.shaded span')].map((span) => span.textContent)")
        assert texts == one.token_texts
    tab.click("nav a[rel=next]")
    tab.until("document.querySelector('h1')?.textContent === 'Step 10'")
    tab.click("nav a[href$='report.html']")
    tab.until("document.querySelector('h1')?.textContent === 'a-run'")


def test_the_keyboard_suffices(pages: Pages, tab: Tab) -> None:
    """Tab, Enter and nothing else: to a step, into a sample, and the table by its ratios."""

    def go_to(script: str) -> None:
        for _ in range(200):
            tab.press("Tab", 9)
            if tab.run(f"(() => {{ const at = document.activeElement; return {script}; }})()"):
                return
        raise AssertionError(f"200 times Tab do not lead to {script}")

    tab.show(pages.all["failed"])
    go_to("at.matches('table.steps a') && at.textContent === '10'")
    tab.press("Enter", 13, "\r")
    tab.until("document.querySelector('h1')?.textContent === 'Step 10' && document.readyState === 'complete'")
    go_to("at.matches('summary') && at.textContent.startsWith('Sample 1')")
    tab.press("Enter", 13, "\r")
    tab.until(OPENED)
    go_to("at.matches('th button') && at.textContent === 'Ratio'")
    tab.press("Enter", 13, "\r")
    tab.until("document.activeElement.closest('th').getAttribute('aria-sort') === 'descending'")
    ratios = [one for one in recorded(pages, 10, 0)[1].ratios or () if one is not None]
    column = "[...document.querySelectorAll('.tokens table tbody tr')].map((row) => row.cells[row.cells.length - 2])"
    shown = tab.run(f"{column}.map((cell) => cell.textContent)")
    assert shown == [written(one, 6) for one in sorted(ratios, reverse=True)[:200]]
    outline = tab.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus is seen"


def test_tokens_are_shaded_by_what_the_reader_chooses(pages: Pages, tab: Tab) -> None:
    tab.show(pages.all["step"])
    tab.click("a[href='#g1s1']")
    tab.until(OPENED)
    one = recorded(pages, 5, 1)[1]
    assert one.ratios is not None
    farthest = max(range(one.length), key=lambda place: abs(sure(one.ratios, place) - 1.0))
    share = "[...document.querySelectorAll('#g1s1 .shaded span')].map((s) => s.style.getPropertyValue('--share'))"
    assert tab.run(share)[farthest] == "1.000"
    tab.run(
        "(() => { const one = document.querySelector('#g1s1 select'); one.value = 'engine';"
        " one.dispatchEvent(new Event('change')); })()"
    )
    lowest = min(range(one.length), key=lambda place: sure(one.rollout_logprobs, place))
    assert tab.run(share)[lowest] == "1.000" and tab.run(share)[farthest] != "1.000"


def sure(values: list[float | None] | None, place: int) -> float:
    """A number that is known to be there."""
    found = None if values is None else values[place]
    assert found is not None
    return found


@pytest.mark.parametrize("name", NAMES)
def test_without_scripts_all_but_the_tokens_is_there(name: str, pages: Pages, tab: Tab) -> None:
    tab.show(pages.all[name])
    text = "document.querySelector('main').innerText"
    with_scripts = tab.run(text)
    tab.scripts(False)
    without = tab.show(pages.all[name]).run(text)
    tab.scripts(True)
    missing = [line for line in with_scripts.splitlines() if line.strip() and line not in without]
    assert missing == []
    if name == "step":
        assert "The table of tokens needs JavaScript" in without


def test_a_link_to_a_sample_opens_it(pages: Pages, tab: Tab) -> None:
    """As somebody sends it: the address of a page with the sample behind the hash."""
    tab.show(pages.all["step"])
    address = pages.all["step"].resolve().as_uri()
    tab.call("Page.navigate", url="about:blank")
    tab.call("Page.navigate", url=f"{address}#g1s0")
    tab.until("document.querySelector('h1')?.textContent === 'Step 5'")
    tab.until(OPENED)
    assert tab.run("document.querySelector('.sample[open] .inside').id") == "g1s0"
    tab.requests.clear()
    tab.settle()
    tab.requests[:] = [url for url in tab.requests if url != "about:blank"]


def test_a_reader_chooses_right_wrong_or_failed_answers(pages: Pages, tab: Tab) -> None:
    shown = opened(tab, pages, "failed")
    visible = (
        "[...document.querySelectorAll('.answered')].filter((one) => one.offsetParent).map((one) => one.classList[1])"
    )
    assert sorted(set(shown.run(visible))) == ["failed", "right", "wrong"]
    for kind in ("failed", "wrong", "right", "all"):
        shown.run(f"document.querySelector('label[for=answers-{kind}]').click()")
        found = set(shown.run(visible))
        assert found == ({"failed", "right", "wrong"} if kind == "all" else {kind}), kind

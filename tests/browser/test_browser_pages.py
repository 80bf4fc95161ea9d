"""The pages in a real browser: quiet console, readable, in shape, inert, usable by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT
from evenhand.trajectory import write_trajectories
from run_builder import group, write_run
from viewer_server import make_index, served

from .conftest import DOWN, ESCAPE, EVIL, LEFT, Browser

pytestmark = pytest.mark.browser

KINDS = ("audit", "report", "viewer")
CONTRAST = (ROOT / "tests/browser/contrast.js").read_text(encoding="utf-8")
SHOWN = "document.querySelector('.group')?.dataset.key"
SELECTED = "document.querySelector('.row[aria-selected=true]')?.dataset.key"
TOTAL = "Number(document.getElementById('total').textContent.replaceAll(',', ''))"


def ready(browser: Browser, kind: str) -> None:
    if kind == "viewer" and browser.js("return innerWidth > 760"):
        browser.wait("document.querySelector('.group .trajectory')")


# --- every page ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_quiet_in_shape_and_readable(
    browser: Browser, pages: dict[str, str], kind: str, width: int, dark: bool
) -> None:
    browser.open(pages[kind], width=width, dark=dark)
    ready(browser, kind)
    if kind == "viewer" and width == 400:
        assert_readable(browser, width)
        browser.js("document.querySelector('.row').click()")
        browser.wait("document.querySelector('.group .trajectory')")
    if kind == "report":
        browser.js("document.querySelectorAll('details').forEach((part) => part.open = true)")
    assert_readable(browser, width)
    assert browser.errors() == []


def assert_readable(browser: Browser, width: int) -> None:
    assert browser.js("return document.documentElement.scrollWidth") <= width
    assert browser.js("return document.body.scrollWidth") <= width
    wide = browser.js(
        "return [...document.querySelectorAll('main > *, header, form, section, figure, .card')]"
        ".filter((e) => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 1"
        " && !e.closest('.members, .scroll')).map((e) => e.className)"
    )
    assert wide == []
    found = browser.js(CONTRAST)
    assert found["checked"] > 30
    assert found["poor"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_markup_in_rollouts_is_inert_and_shown_as_text(
    browser: Browser, pages: dict[str, str], kind: str
) -> None:
    browser.open(pages[kind])
    ready(browser, kind)
    if kind == "viewer":
        browser.js("document.querySelectorAll('.row')[2].click()")
        browser.wait(f"{SHOWN} === document.querySelectorAll('.row')[2].dataset.key")
    assert browser.js("return window.owned") is None
    assert browser.js("return document.querySelectorAll('img').length") == 0
    assert EVIL in browser.js("return document.body.textContent")
    assert browser.errors() == []


@pytest.mark.parametrize("kind", KINDS)
def test_light_and_dark_can_be_switched_and_stay(
    browser: Browser, pages: dict[str, str], kind: str
) -> None:
    browser.open(pages[kind])
    before = browser.js("return getComputedStyle(document.body).backgroundColor")
    browser.js("document.querySelector('button.theme').click()")
    after = browser.js("return getComputedStyle(document.body).backgroundColor")
    assert before != after
    browser.driver.refresh()
    assert browser.js("return getComputedStyle(document.body).backgroundColor") == after
    browser.js("localStorage.clear()")


# --- the report ----------------------------------------------------------------------------------


def test_pointing_at_a_curve_shows_its_values(browser: Browser, pages: dict[str, str]) -> None:
    browser.open(pages["report"])
    browser.js(
        "const plot = document.querySelector('svg.curves'); plot.scrollIntoView();"
        "const box = plot.getBoundingClientRect();"
        "plot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width * .9,"
        " clientY: box.top + 50}))"
    )
    text = browser.js("return document.querySelector('.tip').innerText")
    assert text.startswith("step 6")
    assert "run 0.6 [" in text
    assert "other 0.8 [" in text


def test_a_series_can_be_switched_off(browser: Browser, pages: dict[str, str]) -> None:
    browser.open(pages["report"])
    visible = ("[...document.querySelectorAll('.series.s1')]"
               ".filter((e) => getComputedStyle(e).display !== 'none')")  # fmt: skip
    assert browser.js(f"return {visible}.length") > 3
    browser.js("document.querySelector('[data-series=s1]').click()")
    assert browser.js(f"return {visible}.length") == 0


def test_the_alarm_stands_in_the_curves(browser: Browser, pages: dict[str, str]) -> None:
    browser.open(pages["report"])
    assert browser.js("return document.querySelectorAll('svg .mark').length") > 5


# --- the viewer ----------------------------------------------------------------------------------


@pytest.fixture
def viewer(browser: Browser, pages: dict[str, str]) -> Browser:
    browser.open(pages["viewer"])
    browser.wait("document.querySelector('.group .trajectory')")
    return browser


def test_keys_walk_the_list_and_the_group(viewer: Browser) -> None:
    keys = viewer.js("return [...document.querySelectorAll('.row')].map((r) => r.dataset.key)")
    viewer.press("j")
    viewer.wait(f"{SHOWN} === '{keys[1]}'")
    viewer.press(DOWN)
    viewer.wait(f"{SHOWN} === '{keys[2]}'")
    viewer.press("k")
    viewer.wait(f"{SHOWN} === '{keys[1]}' && {SELECTED} === '{keys[1]}'")
    members = viewer.js("return [...document.querySelectorAll('.member-card')].map((m) =>"
                        " m.dataset.key)")  # fmt: skip
    at = members.index(keys[1])
    viewer.press("l")
    viewer.wait(f"{SHOWN} === '{members[at + 1]}'")
    viewer.press(LEFT)
    viewer.wait(f"{SHOWN} === '{members[at]}'")
    assert viewer.errors() == []


def test_slash_searches_and_escape_leaves_then_clears(viewer: Browser) -> None:
    viewer.press("/")
    assert viewer.js("return document.activeElement.name") == "text"
    viewer.press("query 1")
    viewer.wait(f"{TOTAL} === 36")
    viewer.press(ESCAPE)
    assert viewer.js("return document.activeElement.name") != "text"
    viewer.press(ESCAPE)
    viewer.wait(f"{TOTAL} === 144")


def test_the_help_opens_and_closes_by_keyboard(viewer: Browser) -> None:
    viewer.press("?")
    assert viewer.js("return document.getElementById('help').open")
    assert viewer.js(CONTRAST)["poor"] == []
    viewer.press(ESCAPE)
    viewer.wait("!document.getElementById('help').open")


def test_filters_narrow_the_list_and_stand_in_the_address(viewer: Browser) -> None:
    fill(viewer, "step", "2-3")
    viewer.wait(f"{TOTAL} === 48")
    fill(viewer, "reward", "1")
    viewer.wait(f"{TOTAL} === 24")
    assert "step=2-3" in viewer.driver.current_url
    viewer.driver.refresh()
    viewer.wait(f"{TOTAL} === 24")
    viewer.js("document.getElementById('clear').click()")
    viewer.wait(f"{TOTAL} === 144")


def test_a_kept_address_opens_its_rollout(browser: Browser, pages: dict[str, str]) -> None:
    rows = "document.querySelectorAll('#rows .row')"
    browser.open(f"{pages['viewer']}?step=2-3")
    key = browser.js(f"return {rows}[5].dataset.key")
    browser.open(f"{pages['viewer']}?step=2-3#{key}")
    chosen = f"#rows [data-key='{key}'][aria-selected=true]"
    browser.wait(f'document.querySelector("{chosen}") && location.hash === "#{key}"', seconds=10)


def fill(browser: Browser, name: str, value: str) -> None:
    browser.js(
        "const field = document.querySelector(`[name=${arguments[0]}]`);"
        "field.value = arguments[1]; field.dispatchEvent(new Event('input', {bubbles: true}))",
        name, value,
    )  # fmt: skip


def test_a_wrong_condition_is_said_where_the_list_was(viewer: Browser) -> None:
    fill(viewer, "step", "abc")
    viewer.wait("document.getElementById('rows').innerText.includes('is no condition')")
    fill(viewer, "step", "")
    viewer.wait(f"{TOTAL} === 144")


def test_an_alarm_leads_to_the_rollouts_of_its_step(viewer: Browser) -> None:
    viewer.js("document.querySelector('button[data-alarm]').click()")
    viewer.wait(f"{TOTAL} === 24")
    steps = viewer.js("return [...document.querySelectorAll('.row .step')].map((s) => s.innerText)")
    assert set(steps) == {"step 3"}


def test_orders(viewer: Browser) -> None:
    fill(viewer, "sort", "worst")
    viewer.wait("document.querySelector('.row .dot').classList.contains('bad')")
    fill(viewer, "sort", "reward")
    viewer.wait("document.querySelector('.row .dot').classList.contains('good')")


def test_the_list_goes_on_as_one_scrolls(viewer: Browser) -> None:
    for wanted in (120, 144):
        viewer.js("document.getElementById('rows').scrollTop = 1e6")
        viewer.wait(f"document.querySelectorAll('.row').length >= {wanted}")
    keys = viewer.js("return [...document.querySelectorAll('.row')].map((r) => r.dataset.key)")
    assert len(set(keys)) == 144


def test_credit_silver_and_supporting_pages_are_marked(viewer: Browser) -> None:
    fill(viewer, "step", "2")
    fill(viewer, "searches", "2")
    viewer.wait(f"{TOTAL} === 6")
    viewer.js("document.querySelector('.row').click()")
    viewer.wait("document.querySelectorAll('.badge.silver').length > 0")
    assert viewer.js("return document.querySelectorAll('.badge.gold').length") > 0
    green = viewer.js("return getComputedStyle(document.querySelector('.segment.pos .t'))"
                      ".backgroundColor")  # fmt: skip
    assert green not in ("rgba(0, 0, 0, 0)", "transparent")
    viewer.press("o")
    assert viewer.js("return document.querySelector('details.document').open")


def test_on_a_narrow_screen_a_rollout_covers_the_list_and_escape_brings_it_back(
    browser: Browser, pages: dict[str, str]
) -> None:
    browser.open(pages["viewer"], width=400)
    assert not browser.js("return document.getElementById('detail').checkVisibility()")
    browser.js("document.querySelectorAll('.row')[3].click()")
    browser.wait("document.querySelector('.group .trajectory')?.checkVisibility()")
    assert not browser.js("return document.querySelector('.list').checkVisibility()")
    browser.press(ESCAPE)
    browser.wait("document.querySelector('.list').checkVisibility()")


# --- a run that is being trained -----------------------------------------------------------------


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    run = write_run(tmp_path / "run", steps=2, groups=1)
    with served(make_index(tmp_path / "cache", run)) as address:
        yield run, f"http://{address}/"


def test_a_new_step_appears_while_the_page_is_open(
    browser: Browser, live: tuple[Path, str]
) -> None:
    run, address = live
    browser.open(address)
    browser.wait("document.querySelector('.group .trajectory')")
    assert browser.js("return document.getElementById('run-state').textContent") == "running"
    shown = browser.js(f"return {SHOWN}")
    write_trajectories(run / "trajectories/step-000003.jsonl.gz", group(3, 0, text="Fresh one?"))
    browser.wait(f"{TOTAL} === 12")
    assert "Fresh one?" in browser.js("return document.querySelector('.row').innerText")
    # What is being read stays.
    assert browser.js(f"return {SHOWN}") == shown
    assert browser.errors() == []


def test_without_following_a_new_step_is_only_announced(
    browser: Browser, live: tuple[Path, str]
) -> None:
    run, address = live
    browser.open(address)
    browser.wait("document.querySelector('.group .trajectory')")
    browser.press("f")
    write_trajectories(run / "trajectories/step-000003.jsonl.gz", group(3, 0))
    browser.wait("!document.getElementById('new').hidden")
    assert browser.js(f"return {TOTAL}") == 8
    browser.js("document.getElementById('new').click()")
    browser.wait(f"{TOTAL} === 12")


def test_a_server_that_stopped_is_said(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    with served(make_index(tmp_path / "cache", run)) as address:
        browser.open(f"http://{address}/")
        browser.wait("document.querySelector('.group .trajectory')")
    browser.wait("document.getElementById('progress').innerText === 'the server has stopped'")

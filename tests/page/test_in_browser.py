"""Pages in Chromium: their content, keys, zoom, search, themes, print. They load nothing else."""

import itertools
import re

import pytest

import mpmd
from tests.page.conftest import GROUPS, HOSTILE, MICROBATCHES
from tests.support.drawn_profiles import drawn_profile
from tests.support.plans import pipeline_plan

pytestmark = pytest.mark.browser

SECTIONS = [
    "Findings",
    "Timeline",
    "Idle time",
    "Critical path",
    "What if",
    "Memory",
    "Tasks",
    "Messages",
    "Stages",
    "Processes",
    "Compiling",
]


@pytest.fixture
def page(open_page, page_file):
    return open_page(page_file)


def measured(page):
    return page.locator("#panels canvas").first


def pressed(page, *keys):
    """The selection after keys on the measured timeline."""
    measured(page).focus()
    for key in keys:
        page.keyboard.press(key)
    return page.locator("#selected").inner_text()


def span(page):
    """The span in sight, as text."""
    page.wait_for_timeout(60)
    return page.locator("#span").inner_text()


def width(page):
    """The length of the span in sight in milliseconds."""
    units = {"ns": 1e-6, "µs": 1e-3, "ms": 1, "s": 1000}
    start, end = (
        float(number) * units.get(unit, 0)
        for number, unit in re.findall(r"([\d.]+)(?: (ns|µs|ms|s))?(?= to|$)", span(page))
    )
    return end - start


def box_in_sight(page):
    """The place of the measured timeline, after it was scrolled to."""
    page.locator("#timeline").evaluate("node => node.scrollIntoView({behavior: 'instant'})")
    return measured(page).bounding_box()


def picture(canvas):
    return canvas.evaluate("canvas => canvas.toDataURL()")


def test_all_sections_are_there(page):
    titles = page.locator("main section h2").all_inner_texts()
    assert titles == SECTIONS
    assert page.locator("nav a").all_inner_texts() == SECTIONS
    for name in titles:
        page.get_by_role("link", name=name, exact=True).click()
    assert page.locator("#idle tbody tr").count() >= GROUPS
    assert "Other schedules" not in page.locator("main").inner_text()
    assert page.locator("#tasks tbody tr").count() == 4 * GROUPS
    assert page.locator("#findings li").count() >= 1


def test_names_from_outside_are_shown_as_they_are(page):
    assert page.title() == f"A step {HOSTILE}"
    assert page.locator("h1").inner_text() == f"A step {HOSTILE}"
    assert HOSTILE in page.locator("#tasks").inner_text()
    assert HOSTILE in page.locator("#stages").inner_text()
    assert HOSTILE in page.locator("#processes").inner_text()
    assert page.locator("img").count() == 0


def test_keys_go_from_task_to_gap_to_what_it_waited_for(page):
    first = pressed(page, "ArrowRight")
    assert first.startswith("before_0")
    assert "Group 0:" in first or "group 0" in first.lower()
    texts = [first]
    while "Waited for bwd_1__0" not in texts[-1]:
        texts.append(pressed(page, "ArrowRight"))
        assert len(texts) < 3 * MICROBATCHES
    assert texts[-1].startswith("Group 0 is idle")
    assert [pressed(page, "ArrowLeft") for _ in texts[1:]] == texts[-2::-1]
    pressed(page, *["ArrowRight"] * (len(texts) - 1))
    assert pressed(page, "Enter").startswith("bwd_1__0")
    assert "of group 1" not in pressed(page, "ArrowDown")
    assert "Group 2" in page.locator("#selected").inner_text()


def test_a_selection_is_announced(page):
    card = page.get_by_role("status", name="Selection")
    pressed(page, "ArrowRight")
    assert card.get_attribute("aria-live") == "polite"
    assert "before_0" in card.inner_text()
    assert "Processor time" in card.inner_text()


def test_zoom_and_pan_by_keys(page):
    whole = width(page)
    pressed(page, "+", "+")
    assert width(page) == pytest.approx(whole / 4, rel=0.05)
    before = span(page)
    pressed(page, "Shift+ArrowRight")
    assert span(page) != before
    assert width(page) == pytest.approx(whole / 4, rel=0.05)
    pressed(page, "-")
    assert width(page) == pytest.approx(whole / 2, rel=0.05)
    pressed(page, "0")
    assert width(page) == pytest.approx(whole)


@pytest.mark.slow
def test_zoom_to_the_selection(page):
    whole = width(page)
    pressed(page, "ArrowRight", "f")
    assert width(page) < whole / 4


@pytest.mark.slow
def test_mouse_drags_wheels_and_selects(page):
    box = box_in_sight(page)
    x, y = box["x"] + box["width"] / 2, box["y"] + 10
    whole = width(page)
    page.mouse.move(x, y)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -600)
    page.keyboard.up("Control")
    page.wait_for_timeout(100)
    zoomed = width(page)
    assert zoomed < whole / 2
    before = span(page)
    page.mouse.down()
    page.mouse.move(x - 200, y, steps=4)
    page.mouse.up()
    assert span(page) != before
    assert width(page) == pytest.approx(zoomed, rel=0.05)
    assert page.locator("#selected h4").count() == 0  # a drag selects nothing
    page.mouse.click(x, y)
    assert page.locator("#selected h4").count() == 1


@pytest.mark.slow
def test_the_wheel_alone_scrolls_the_page(page):
    box = box_in_sight(page)
    whole = span(page)
    page.mouse.move(box["x"] + 300, box["y"] + 10)
    before = page.evaluate("scrollY")
    page.mouse.wheel(0, 300)
    page.wait_for_timeout(400)
    assert page.evaluate("scrollY") > before + 100
    assert span(page) == whole


@pytest.mark.slow
def test_the_tip_tells_of_what_is_under_the_pointer(page):
    box = box_in_sight(page)
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 10)
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert "from" in tip.inner_text()
    page.mouse.move(5, 5)
    assert tip.is_hidden()


def test_search(page):
    page.keyboard.press("/")
    search = page.get_by_role("searchbox", name="Find")
    assert search.evaluate("input => input === document.activeElement")
    search.fill("bwd_2__5")
    count = page.locator("#search-count")
    assert count.inner_text() == "1 found"
    before = picture(measured(page))
    search.press("Enter")
    assert count.inner_text() == "1 of 1"
    assert page.locator("#selected h4").inner_text().startswith("bwd_2__5")
    search.fill("bwd_2")
    assert count.inner_text() == f"{MICROBATCHES} found"
    search.press("Shift+Enter")
    assert count.inner_text() == f"{MICROBATCHES} of {MICROBATCHES}"
    search.fill("bwd_")
    assert count.inner_text() == f"{GROUPS * MICROBATCHES} found"
    search.fill("nothing")
    assert count.inner_text() == "no task"
    search.press("Escape")
    assert count.inner_text() == ""
    page.wait_for_timeout(60)
    assert picture(measured(page)) != before


def test_findings_lead_to_tasks(page):
    page.locator("#findings button").first.click()
    assert page.locator("#selected h4").count() == 1
    assert measured(page).evaluate("canvas => canvas === document.activeElement")


def test_what_is_shown_is_large_enough_to_see(open_page, tmp_path):
    """Of a long step, the whole of which is in sight at first."""
    file = tmp_path / "long.html"
    drawn_profile(pipeline_plan(mpmd.Std1F1B(2), 300)).write_html(file)
    page = open_page(file)
    whole = width(page)
    page.locator("#findings button").first.click()
    assert width(page) < whole / 4
    page.locator("#zoom-all").click()
    page.get_by_role("searchbox", name="Find").fill("fwd_1__250")
    page.get_by_role("button", name="Next").click()
    assert width(page) < whole / 4


@pytest.mark.slow
def test_other_simulations(page):
    simulated = page.locator("#panels canvas").nth(1)
    before = picture(simulated)
    page.get_by_label("Below").select_option(label="Ideal")
    page.wait_for_timeout(60)
    assert picture(simulated) != before
    assert "Ideal" in simulated.get_attribute("aria-label")


@pytest.mark.slow
def test_tables_sort(page):
    heads = page.locator("#tasks thead th")
    median = heads.filter(has_text="Median")
    assert heads.filter(has_text="Sum").get_attribute("aria-sort") == "descending"
    median.get_by_role("button").click()
    first = page.locator("#tasks tbody tr th").first.inner_text()
    assert (median.get_attribute("aria-sort"), first) == ("descending", "bwd_1")
    median.get_by_role("button").click()
    assert median.get_attribute("aria-sort") == "ascending"
    assert page.locator("#tasks tbody tr th").first.inner_text() != first


@pytest.mark.slow
def test_memory_of_another_group(page):
    chart = page.locator("#memory canvas")
    before = chart.get_attribute("aria-label")
    page.get_by_role("combobox", name="Memory of").select_option(label="group 3")
    assert "group 3" in chart.get_attribute("aria-label") != before


@pytest.mark.slow
def test_dark_follows_the_system_until_the_switch(open_page, page_file):
    page = open_page(page_file, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    switch = page.get_by_role("button", name="Dark")
    assert switch.get_attribute("aria-pressed") == "true"
    drawn = picture(measured(page))
    switch.click()
    page.wait_for_timeout(60)
    assert switch.get_attribute("aria-pressed") == "false"
    assert page.evaluate(background) == "rgb(255, 255, 255)" != dark
    assert picture(measured(page)) != drawn
    page.emulate_media(color_scheme="light")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) == "rgb(255, 255, 255)"


@pytest.mark.slow
def test_prints_are_light_and_without_controls(open_page, page_file):
    page = open_page(page_file, color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_timeout(60)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".controls").first.is_hidden()
    assert page.get_by_role("button", name="Dark").is_hidden()
    assert page.locator("#tasks table").is_visible()
    assert len(page.pdf(print_background=True)) > 20_000


@pytest.mark.slow
@pytest.mark.parametrize("size", [360, 768])
def test_narrow_screens_scroll_tables_and_not_the_page(open_page, page_file, comparison_file, size):
    for file in (page_file, comparison_file):
        page = open_page(file, viewport={"width": size, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") == size


@pytest.mark.slow
def test_roles_and_names_for_screen_readers(page):
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.get_by_role("application").count() == 2
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, canvas, table, section, [role]")]
        .filter((node) => !node.closest("[aria-hidden]") && node.offsetParent !== null)
        .filter((node) => !(node.getAttribute("aria-label") || node.getAttribute("aria-labelledby")
          || node.textContent.trim() || (node.labels && node.labels.length) || node.caption))
        .map((node) => node.outerHTML.slice(0, 100))"""
    )
    assert unnamed == []
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


@pytest.mark.slow
def test_contrast_of_text(open_page, page_file):
    """WCAG 2.1, level AA: 4.5 to 1."""
    for scheme in ("light", "dark"):
        page = open_page(page_file, color_scheme=scheme)
        ratios = page.evaluate(
            """() => {
              const luminance = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
                .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
                .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
              const paper = luminance(getComputedStyle(document.body).backgroundColor);
              const texts = document.querySelectorAll("p, a, th, td, dt, dd, h2, h3, li, caption, .saves");
              return [...texts].map((node) => {
                const ink = luminance(getComputedStyle(node).color);
                return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
              });
            }"""
        )
        assert min(ratios) >= 4.5


def test_two_steps(open_page, comparison_file):
    page = open_page(comparison_file)
    titles = page.locator("main section h2").all_inner_texts()
    assert titles == ["What changed", *SECTIONS]
    assert page.get_by_role("application").count() == 2
    rows = page.locator("#changed tbody tr").all_inner_texts()
    assert any(row.startswith("Imbalance") for row in rows)
    assert page.locator("#changed tfoot").inner_text().startswith("Step")
    page.get_by_role("searchbox", name="Find").fill("fwd_1__1")
    assert page.locator("#search-count").inner_text() == "1 found"


def test_the_first_screen_says_where_the_time_goes(open_page, page_file):
    """Wide and light, narrow and dark: the colours with their shares and tooltips, before the findings."""
    for options in ({}, {"color_scheme": "dark", "viewport": {"width": 400, "height": 800}}):
        page = open_page(page_file, **options)
        legend = page.get_by_role("list", name="Where the time of the groups goes")
        box = legend.bounding_box()
        assert box["y"] + box["height"] < 500
        shares = [float(share) for share in re.findall(r"([\d.]+)%", legend.inner_text())]
        assert sum(shares) == pytest.approx(100, abs=1)
        handling = legend.get_by_role("listitem").filter(has_text="Handling").get_attribute("title")
        assert "A group's own time between tasks" in handling and "larger microbatches" in handling
        ideal = page.locator(".figures div").filter(has_text="Ideal").get_attribute("title")
        assert "mpmd.plan compares them" in ideal
        assert "nothing between tasks" in page.locator("#panels h3").nth(1).get_attribute("title")


@pytest.mark.slow
def test_changes_that_save_next_to_nothing_are_folded(page):
    folded = page.locator("#what details")
    assert re.fullmatch(r"\d+ more that save less than 0.5%", folded.locator("summary").inner_text())
    assert folded.locator("table").is_hidden()
    folded.locator("summary").click()
    assert folded.locator("table").is_visible()

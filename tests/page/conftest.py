"""The pages of drawn steps, and a browser that opens them."""

import pathlib

import pytest

import mpmd
from tests.support.browser import started_browser
from tests.support.drawn_profiles import drawn_profile
from tests.support.plans import pipeline_plan

HOSTILE = "</script><img src=x onerror=\"document.title='stolen'\">{{data}}<!--"
"""A name that would be markup, a script and a mark of the template, if anything took it for one."""

GROUPS, MICROBATCHES = 4, 8


@pytest.fixture(scope="session")
def profile():
    plan = pipeline_plan(mpmd.Std1F1B(GROUPS), MICROBATCHES)
    return drawn_profile(plan, steps=3, name=HOSTILE)


@pytest.fixture(scope="session")
def balanced_profile():
    """The same plan with other times, and no slow group."""
    return drawn_profile(pipeline_plan(mpmd.Std1F1B(GROUPS), MICROBATCHES), seed=1, slow_group=-1)


@pytest.fixture(scope="session")
def page_file(profile, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "step.html"
    profile.write_html(path, title=f"A step {HOSTILE}")
    return path


@pytest.fixture(scope="session")
def comparison_file(profile, balanced_profile, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "change.html"
    balanced_profile.write_html(path, before=profile)
    return path


@pytest.fixture(scope="session")
def browser():
    with started_browser() as browser:
        yield browser


@pytest.fixture
def open_page(browser):
    """Opens files, which must load nothing else and write nothing to the console until the test ends."""
    opened = []

    def open_file(path: pathlib.Path, **options):
        context = browser.new_context(**{"viewport": {"width": 1300, "height": 1000}, **options})
        page, requests, messages = context.new_page(), [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("dialog", lambda dialog: messages.append(dialog.message))
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready]")
        opened.append((context, path, requests, messages))
        return page

    yield open_file
    for context, path, requests, messages in opened:
        context.close()
        assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
        assert not messages

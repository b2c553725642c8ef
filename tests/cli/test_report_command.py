"""``mpmd report``: the page of one profile, or of two."""

import json
import os
import sys

import pytest

import mpmd
from tests.support.drawn_profiles import drawn_profile
from tests.support.plans import pipeline_plan


@pytest.fixture
def step_json(tmp_path):
    path = tmp_path / "step.json"
    drawn_profile(pipeline_plan(mpmd.Std1F1B(2), 3)).save(path)
    return path


def test_a_page_beside_the_profile(command, step_json):
    page = step_json.with_suffix(".html")
    assert command("report", step_json) == (0, f"{page}\n", "")
    assert page.read_text().startswith("<!doctype html>")
    assert "Std1F1B, 3 microbatches" in page.read_text()


def test_a_page_elsewhere_replaces_the_file(command, step_json, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("of before")
    assert command("report", step_json, "-o", page) == (0, f"{page}\n", "")
    assert "of before" not in page.read_text()
    assert not step_json.with_suffix(".html").exists()


def test_two_profiles(command, step_json, tmp_path):
    after = tmp_path / "with <b> & more.json"
    drawn_profile(pipeline_plan(mpmd.Std1F1B(2), 3), seed=1).save(after)
    code, out, err = command("report", step_json, after)
    assert (code, out, err) == (0, f"{after.with_suffix('.html')}\n", "")
    text = after.with_suffix(".html").read_text()
    assert "<title>step and with &lt;b&gt; &amp; more</title>" in text
    assert '"changes":{"id":"changed"' in text


def test_a_file_that_exists_is_not_replaced_unasked(command, step_json):
    page = step_json.with_suffix(".html")
    page.write_text("mine")
    code, out, err = command("report", step_json)
    assert (code, out) == (2, "")
    assert f"mpmd: error: {page} exists: name the page with -o" in err
    assert page.read_text() == "mine"


def test_a_page_is_not_written_through_a_link(command, step_json, tmp_path):
    page = step_json.with_suffix(".html")
    page.symlink_to(tmp_path / "elsewhere.html")
    code, out, err = command("report", step_json)
    assert (code, out) == (2, "") and "exists: name the page with -o" in err
    assert not (tmp_path / "elsewhere.html").exists()


@pytest.mark.parametrize("kind", ["pipe", "large", "long"])
def test_files_that_are_not_read(command, tmp_path, kind):
    path = tmp_path / "step.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        path.write_text(json.dumps({"format": "mpmd profile", "version": 2, "profile": {"x" * 10**6: 1}}))
    code, out, err = command("report", path, "-o", tmp_path / "page.html")
    assert (code, out) == (2, "") and len(err) < 2_000 and str(path) in err


def test_names_of_files_are_printed_without_control_characters(command, step_json):
    odd = step_json.rename(step_json.with_name("step\x1b[2J.json"))
    code, out, _ = command("report", odd)
    assert code == 0 and "step\\x1b[2J.html" in out and "\x1b" not in out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not JSON", "it is not JSON"),
        ("[1, 2]", "is not a profile, which step.profile(...).save(path) writes"),
        ('{"format": "mpmd profile", "version": 999}', "of version 999"),
        ('{"format": "mpmd profile", "version": 2, "profile": {}}', "is a damaged profile"),
    ],
)
def test_files_that_are_no_profile(command, tmp_path, step_json, content, said):
    path = tmp_path / "other.json"
    path.write_text(content)
    for arguments in ([path], [step_json, path], [path, step_json]):
        code, out, err = command("report", *arguments, "-o", tmp_path / "page.html")
        assert (code, out) == (2, "")
        assert err.startswith("mpmd: error: ")
        assert "other.json" in err and said in err
    assert not (tmp_path / "page.html").exists()


def test_no_file_and_a_directory(command, tmp_path):
    code, _, err = command("report", tmp_path / "none.json")
    assert code == 2 and err.endswith("none.json: No such file or directory\n")
    code, _, err = command("report", tmp_path)
    assert code == 2 and err == f"mpmd: error: {tmp_path} is a directory, and no profile, which is a file\n"


def test_the_title_of_a_page(command, step_json, tmp_path):
    page = tmp_path / "page.html"
    assert command("report", step_json, "-o", page, "--title", "a <quiet> step")[0] == 0
    assert "<h1>a &lt;quiet&gt; step</h1>" in page.read_text()


@pytest.mark.parametrize("output", ["page.txt", "none/page.html"])
def test_outputs_that_cannot_be(command, step_json, output):
    code, _, err = command("report", step_json, "-o", step_json.parent / output)
    assert code == 2
    assert "usage: mpmd report" in err


def test_a_page_that_cannot_be_written(command, step_json, tmp_path):
    (tmp_path / "page.html").symlink_to(tmp_path / "none" / "page.html")
    code, _, err = command("report", step_json, "-o", tmp_path / "page.html")
    assert code == 2
    assert err.startswith("mpmd: error: ") and "page.html" in err


def test_help_says_what_a_profile_is(command):
    code, out, _ = command("report --help")
    assert code == 0
    assert "step.profile" in out and "examples:" in out


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes on Linux")
def test_a_name_that_is_no_unicode(command, step_json):
    odd = step_json.rename(step_json.with_name("step-\udcff.json"))
    code, _, err = command("report", odd, odd, "-o", step_json.with_name("page.html"))
    assert (code, err) == (0, "")

"""Versions of the site stand beside one another; ``tests/site`` builds and opens them."""

import json

import pytest

from tests.support.pages import DOCS
from tests.support.scripts import module_at

publish = module_at(DOCS / "publish.py")


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A function that publishes a version, whose only page has this version's text."""

    def publish_version(version, release):
        monkeypatch.setattr(publish, "__version__", version)

        def build(folder, target):
            target.mkdir()
            (target / "index.html").write_text(f"{version} as {folder}")

        publish.publish(tmp_path, "/mpmd/", release, build)
        return json.loads((tmp_path / "versions.json").read_text())

    return publish_version


def test_releases_stay_and_the_newest_state_is_renewed(published, tmp_path):
    published("0.9.0", release=True)
    published("0.10.0", release=True)
    entries = published("0.11.0.dev0", release=False)
    assert [entry["name"] for entry in entries] == ["latest", "v0.10", "v0.9"]
    assert [entry["url"] for entry in entries] == ["/mpmd/latest/", "/mpmd/v0.10/", "/mpmd/v0.9/"]
    assert [entry["preferred"] for entry in entries] == [True, False, False]
    texts = {path.parent.name: path.read_text() for path in tmp_path.glob("*/index.html")}
    assert texts == {
        "latest": "0.11.0.dev0 as latest",
        "v0.10": "0.10.0 as v0.10",
        "v0.9": "0.9.0 as v0.9",
    }
    assert "url=latest/index.html" in (tmp_path / "index.html").read_text()


def test_what_cannot_be_built_leaves_what_is_there(published, tmp_path):
    published("0.9.0", release=False)

    def fail(folder, target):
        target.mkdir()
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        publish.publish(tmp_path, "/mpmd/", True, fail)
    assert (tmp_path / "latest" / "index.html").read_text() == "0.9.0 as latest"
    published("0.9.1", release=False)
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"latest", "versions.json", "index.html"}


def test_an_address_without_a_slash_at_the_end_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="ends with a slash"):
        publish.publish(tmp_path, "/mpmd", False, publish.build)
    assert not [*tmp_path.iterdir()]

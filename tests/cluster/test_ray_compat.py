"""The releases of Ray that are accepted, and the messages of Ray that are hidden."""

import logging
import warnings

import pytest

from cluster import ray_compat


def test_only_messages_that_all_is_well_are_hidden_and_only_meanwhile(caplog):
    worker = logging.getLogger("ray._private.worker")
    setup = logging.getLogger("ray._private.authentication.authentication_token_setup")
    with ray_compat.without_messages_to_user():
        worker.warning("Started a local Ray instance.")
        worker.warning("the disk is full")
        setup.warning("Token authentication is enabled for this Ray cluster.")
        setup.warning("Token authentication is disabled for this Ray cluster.")
    worker.warning("Started a local Ray instance.")
    assert caplog.messages == [
        "the disk is full",
        "Token authentication is disabled for this Ray cluster.",
        "Started a local Ray instance.",
    ]


def test_only_the_coming_default_of_ray_is_hidden():
    with warnings.catch_warnings(action="error"), ray_compat.without_messages_to_user():
        warnings.warn("Tip: In future versions of Ray, Ray will", FutureWarning, stacklevel=1)
        with pytest.raises(FutureWarning, match="another"):
            warnings.warn("another", FutureWarning, stacklevel=1)


@pytest.mark.parametrize("release", ["2.54.0", "2.57.1", "2.60.0", "2.60.3", "2.60.0rc1"])
def test_tried_releases_are_accepted_silently(release):
    ray_compat.check_release(release)


def test_an_older_release_says_which_to_install():
    with pytest.raises(RuntimeError, match=r"Ray 2\.53\.1 is too old: mpmd needs Ray 2\.54 or later"):
        ray_compat.check_release("2.53.1")


@pytest.mark.parametrize("release", ["2.61.0", "3.0.0.dev0"])
def test_an_unknown_newer_release_is_a_warning(release):
    with pytest.warns(UserWarning, match=rf"Ray {release} is newer than 2\.60"):
        ray_compat.check_release(release)

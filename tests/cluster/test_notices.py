"""What of Ray's messages is shown when a Ray is started for the user."""

import logging

from cluster.notices import without_notices


def test_only_messages_that_all_is_well_are_hidden_and_only_meanwhile(caplog):
    worker = logging.getLogger("ray._private.worker")
    setup = logging.getLogger("ray._private.authentication.authentication_token_setup")
    with without_notices():
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

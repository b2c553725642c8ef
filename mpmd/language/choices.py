"""Whether rematerialised functions keep discrete choices: ``mpmd.Remat.keep_choices``."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax

_keep_choices = jax.make_user_context(default_value=True)


def keep_choices(keep: bool) -> AbstractContextManager[None]:
    return _keep_choices(keep)


def are_choices_kept() -> bool:
    return _keep_choices.value

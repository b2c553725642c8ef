"""Policies of rematerialisation: what a stage keeps for its backward, and what it computes again. No JAX."""

from __future__ import annotations

import enum


class Remat(enum.StrEnum):
    """A policy of rematerialisation; those of ``jax.checkpoint_policies`` have their names there.

    Each layer of a stage is a function under ``jax.checkpoint``, and always keeps what enters it.

    Attributes:
      NONE: the backward computes nothing again; no ``jax.checkpoint``.
      ATTENTION: the inside of attention is computed again: from the product of queries and keys to the
        product with values. All else is kept.
      DOTS_SAVEABLE: products are kept, and all else is computed again.
      DOTS_WITH_NO_BATCH_DIMS_SAVEABLE: as ``DOTS_SAVEABLE``, but products with batch dimensions, such as
        those of attention, are computed again, too.
      NOTHING_SAVEABLE: all is computed again: full rematerialisation.
    """

    NONE = "none"
    ATTENTION = "attention"
    DOTS_SAVEABLE = "dots_saveable"
    DOTS_WITH_NO_BATCH_DIMS_SAVEABLE = "dots_with_no_batch_dims_saveable"
    NOTHING_SAVEABLE = "nothing_saveable"

    @classmethod
    def of(cls, remat: bool | str) -> Remat:
        """The policy of a name; ``True`` is ``NOTHING_SAVEABLE``, and ``False`` is ``NONE``.

        Raises: ``ValueError`` for a name that is none of them.
        """
        if isinstance(remat, bool):
            return cls.NOTHING_SAVEABLE if remat else cls.NONE
        return cls(remat)

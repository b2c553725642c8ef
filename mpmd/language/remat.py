"""Policies of rematerialisation: the values that a stage keeps, and the values that its backward recomputes.

This file loads no JAX.
"""

from __future__ import annotations

import enum
from contextlib import AbstractContextManager
from typing import Any

_WITHOUT_ATTENTION = (
    "Remat.ATTENTION is gone: put jax.checkpoint around the attention of each layer, or take "
    "Remat.DOTS_WITH_NO_BATCH_DIMS_SAVEABLE, which computes attention and elementwise operations again"
)


class _Policies(enum.EnumMeta):
    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(_WITHOUT_ATTENTION if name == "ATTENTION" else name)


class Remat(enum.StrEnum, metaclass=_Policies):
    """A policy of rematerialisation, by its name in ``jax.checkpoint_policies`` if it has one.

    Each layer of a stage is a function under ``jax.checkpoint``, and always keeps what enters it.

    Attributes:
      NONE: the backward computes nothing again; no ``jax.checkpoint``.
      DOTS_SAVEABLE: products are kept, and all values but products are computed again.
      DOTS_WITH_NO_BATCH_DIMS_SAVEABLE: as ``DOTS_SAVEABLE``, but products with batch dimensions, such as
        attention's, are computed again, too.
      NOTHING_SAVEABLE: all is computed again: full rematerialisation.
    """

    NONE = "none"
    DOTS_SAVEABLE = "dots_saveable"
    DOTS_WITH_NO_BATCH_DIMS_SAVEABLE = "dots_with_no_batch_dims_saveable"
    NOTHING_SAVEABLE = "nothing_saveable"

    @classmethod
    def of(cls, remat: bool | str) -> Remat:
        """The policy of a name; ``True`` is ``NOTHING_SAVEABLE``, and ``False`` is ``NONE``.

        Raises: ``ValueError`` for a name without a policy.
        """
        if isinstance(remat, bool):
            return cls.NOTHING_SAVEABLE if remat else cls.NONE
        if remat not in [*cls]:
            remedy = f": {_WITHOUT_ATTENTION}" if remat == "attention" else ""
            raise ValueError(f"remat must be True, False or one of {', '.join(cls)}, not {remat!r}{remedy}")
        return cls(remat)

    @staticmethod
    def keep_choices(keep: bool) -> AbstractContextManager[None]:
        """A context for functions under ``jax.checkpoint`` that make choices, such as a token's expert.

        ::

            with mpmd.Remat.keep_choices(False):
                x = jax.checkpoint(layer)(x)

        By default a stage keeps the choices of such functions: the integers of ``top_k``, ``argmax`` and
        sorts, and values computed from floating-point values and read as an index or a predicate. A backward
        that chose again could choose differently, as XLA rounds otherwise in another executable. Choices with
        more than 1% of the bytes of a function's activations are made again, and ``mpmd.explain`` says so.

        Args:
          keep: ``False``: a stage keeps what the policy of ``jax.checkpoint`` says, and no more.
        """
        from mpmd.language.choices import keep_choices  # loads JAX

        return keep_choices(keep)

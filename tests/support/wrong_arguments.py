"""A public function, and the values that its parameters do not take, by their names and defaults."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

VALUES: Mapping[str, Any] = {
    "object": object(),
    "number": 3,
    "negative": -1,
    "float": 3.5,
    "nan": float("nan"),
    "text": "x",
    "none": None,
    "list": [1],
    "objects": [object()],
    "flag": True,
    "dict": {"a": "b"},
    "sizes": {"a": 1},
}
"""What is passed for each parameter that does not take it."""

KINDS: Mapping[str, set[str]] = {
    "special": set(),
    "anything": set(VALUES),
    "count": {"number"},
    "int": {"number", "negative"},
    "amount": {"number", "float"},
    "text": {"text"},
    "flag": {"flag"},
    "positions": {"number", "negative", "list"},
    "argument": {"number", "negative", "text"},
    "counts": {"list"},
    "numbers": {"number", "negative", "float", "nan", "list", "flag", "sizes"},
    "number or array": {"number", "negative", "float", "nan", "flag"},
    "count or counts": {"number", "list"},
    "time or times": {"number", "float", "list"},
    "mapping": {"dict", "sizes"},
    "sizes": {"sizes"},
}
"""For each kind of parameter the values that it takes; with ``?`` at its end, also ``None``."""

_NAMES = {
    "count": """
    devices_per_node every first_step length loop max_failures max_in_flight mpmd_dim mpmd_idx multiple n
    nodes num_devices num_layers num_microbatches num_places num_stages simulate slices spares steps
    verify_every
    """,
    "amount": """
    alone at_once backward backward_bytes backward_operations bandwidth collective_floor cpus_per_device
    cpus_per_group examples flops forward gpus_per_group held_for_bwdw hop kernel_floor latency load_timeout
    memory memory_bandwidth memory_limit message_bytes nbytes operations operations_per_second seconds
    share_after step_timeout stuck_after task_overhead timeout tokens
    """,
    "flag": """
    accumulates_products atomic blocking eager encryption flash_attention fsdp fuse_steady_state has_aux infs
    measure merges_all_reduces nans of_plan overlaps_gathers remat sequence_parallel split_backward
    """,
    "text": """
    accelerator_types address capture compilation_cache dimensions directory divides donate_argnames kind name
    on_corruption part path platform static_argnames task text title to trace_dir
    """,
    "positions": "argnums batch_argnums donate_argnums static_argnums",
    "argument": "argnum",
    "counts": "layers_per_stage stages_per_group",
    "numbers": "carry",
    "mapping": "kwargs runtime_env",
    "int": "axis",
    "anything": "target",
    "time or times": "fwd bwd bwdA bwdW",
}
BY_NAME = {name: kind for kind, names in _NAMES.items() for name in names.split()}
"""The kinds of parameters, by their names; those of others are ``special``."""


@dataclasses.dataclass(frozen=True)
class Public:
    """A public function.

    Attributes:
      valid: arguments of a call that it accepts.
      kinds: of parameters that take something else than their names say, or are not in the signature.
      alias: its public name, where its definition has another.
    """

    function: Callable
    valid: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    alias: str = ""

    @property
    def name(self) -> str:
        return self.alias or self.function.__qualname__

    def refused(self) -> list[tuple[str, str]]:
        """Its parameters, each with the name of a value that it does not take."""
        return [
            (parameter, value)
            for parameter, taken in self._taken().items()
            for value in VALUES
            if value not in taken
        ]

    def call(self, **changed: Any) -> Any:
        """Calls it with valid arguments but for some."""
        return self.function(**{**self.valid, **changed})

    def _taken(self) -> dict[str, set[str]]:
        """For each parameter the names of the values that it takes: also ``None``, if this is its default."""
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        signature = inspect.signature(self.function).parameters
        kinds = {
            name: BY_NAME.get(name, "special") + "?" * (parameter.default is None)
            for name, parameter in signature.items()
            if parameter.kind not in several
        }
        kinds |= self.kinds
        return {
            name: KINDS[kind.removesuffix("?")] | ({"none"} if kind.endswith("?") else set())
            for name, kind in kinds.items()
        }

"""A train step as data, which prints as the call that makes it."""

from __future__ import annotations

import dataclasses


class Described:
    """Prints as the call that makes it, without what is as by default."""

    def _changed(self):
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return [(field.name, value) for field, value in values if value != field.default]

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._changed())})"

    def _repr_pretty_(self, printer, cycle):
        """The same over several lines, as Hypothesis shows it."""
        with printer.group(4, f"{type(self).__name__}(", ")"):
            for name, value in self._changed():
                printer.breakable("")
                printer.text(f"{name}=")
                printer.pretty(value)
                printer.text(", ")


@dataclasses.dataclass(frozen=True, repr=False)
class Layer(Described):
    """``h = operation(h)``; see ``layers.py``.

    Attributes:
      weight: the number of the weight, for an operation that has one.
      wraps: transformations of JAX around the operation, the innermost first.
      frozen: the weight's gradient stops.
    """

    operation: str
    weight: int | None = None
    wraps: tuple[str, ...] = ()
    frozen: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class Skip(Described):
    """Adds what the stage ``back`` stages before made.

    It is taken ``before`` or ``after`` the mark there, or carried through all ``marks`` up to here.
    """

    back: int = 1
    route: str = "before"


@dataclasses.dataclass(frozen=True, repr=False)
class Stage(Described):
    """In this order: cast, add skips and the microbatch, apply layers, touch the sides, stop, mark.

    Attributes:
      stops: the gradient.
      marks_sides_only: the activations go past the mark, if there are sides in it.
      jit_mark: the mark is in a function under ``jax.jit``.
    """

    layers: tuple[Layer, ...] = ()
    skips: tuple[Skip, ...] = ()
    dtype: str = "float32"
    reads_input: bool = False
    touches_sides: bool = False
    stops: bool = False
    marks_sides_only: bool = False
    jit_mark: bool = False


@dataclasses.dataclass(frozen=True, repr=False)
class Side(Described):
    """A value besides the activations that stages read and change, in the marks or past them."""

    kind: str
    marked: bool = True


@dataclasses.dataclass(frozen=True, repr=False)
class Output(Described):
    """A value of each microbatch, and the operation that combines it."""

    value: str
    operation: str = "Add"


@dataclasses.dataclass(frozen=True, repr=False)
class Program(Described):
    """A train step.

    Attributes:
      chance: which schedule by chance, and whether the steady state of one that is not is fused.
      weights: their dtypes.
      stacked: the weights are slices of one parameter.
      undifferentiated: the weights that are only read.
      mode: ``grad``, ``jvp`` (the loss and its slope) or ``forward``.
      loss_back: how many stages before the last one make what the loss is of.
      vmap: where one example at a time is mapped over the batch: around the ``loss`` or the ``gradient``.
      jit: what of the step is under ``jax.jit``: ``loss``, ``body``, ``loop`` or ``update``.
      before, inside: what is done to weights and inputs before the loop, and in it before the first stage.
      marks_weights: all weights go through every mark.
      gradients_inside: what is done to the gradients of each microbatch: ``clip`` by their global norm, or
        scale ``by_loss``.
      loop_over_index: with ``treduce_i``; otherwise with ``treduce``, along ``axis``.
      keys_in_batch: the microbatches' keys come with them, rather than from the index.
      update: when gradients are not finite, ``cond`` or ``where`` keeps the state; ``twice`` is a loop.
      results: what the step returns besides.
      submesh: how a group's devices share the work.
      donate: the arguments that are given up: the ``state`` or ``all``.
      again: the schedule and the number of groups of a second loop, with what the first one has updated.
    """

    stages: tuple[Stage, ...]
    groups: int
    schedule: str = "GPipe"
    chance: int = 0
    microbatches: int = 1
    weights: tuple[str, ...] = ("float32",)
    stacked: bool = False
    undifferentiated: tuple[int, ...] = ()
    mode: str = "grad"
    sides: tuple[Side, ...] = ()
    outputs: tuple[Output, ...] = ()
    loss: str = "squares"
    loss_back: int = 0
    l2: bool = False
    loss_operation: str = "Add"
    gradient_operation: str = "Add"
    input_gradient: bool = False
    last_mark: bool = False
    vmap: str = ""
    jit: str = ""
    marks_weights: bool = False
    gradients_inside: str = ""
    loop_over_index: bool = False
    keys_in_batch: bool = False
    axis: int = 0
    before: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    optimizer: str = "sgd"
    update: str = ""
    results: tuple[str, ...] = ()
    submesh: str = ""
    donate: str = ""
    again: tuple[str, int] | None = None

    @property
    def precise(self) -> bool:
        """Whether all floating-point numbers are float32."""
        dtypes = {*self.weights, *(stage.dtype for stage in self.stages)}
        return dtypes <= {"float32"} and "half" not in {side.kind for side in self.sides}

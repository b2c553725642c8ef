"""``mpmd.jit``: a step as users hold it, called like the function it was made from."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args, overload

import jax

from mpmd.arguments.call import Call
from mpmd.arguments.keywords import argument_faults, check_keywords, specs_or_shardings
from mpmd.arguments.leaves import as_described
from mpmd.arguments.signature import CallSignature
from mpmd.arguments.specs import keyword_specs_faults, output_specs, specs_faults
from mpmd.arguments.specs_of_calls import SpecsOfCalls
from mpmd.arrays.array import MpmdArray
from mpmd.compat import api_boundary, trace_context
from mpmd.compiler.pipeline import CompiledStep, compile_step
from mpmd.compiler.request import CompileRequest, Gather, PartialSums, SequenceParallel
from mpmd.explanation import warn_of_mistakes
from mpmd.ir.placement import ANYWHERE, Placement
from mpmd.ir.plan import Spec, cut_lines
from mpmd.meshes.group_mesh import GroupMesh, mesh_fault
from mpmd.profile.profile import Profile
from mpmd.runtime.protocol import Runtime
from mpmd.runtime.step_meter import StepMeter
from mpmd.step.loaded_step import LoadedStep
from mpmd.step.lowered_step import LoweredStep
from mpmd.step.part_numbers import of_part, placements_in
from mpmd.step.tracing import TracedFunction, described
from mpmd.util.notebook import ShownAsText
from mpmd.util.tracers import TracedArgumentError
from mpmd.validation import callable_fault, choice_fault, raise_faults

_logger = logging.getLogger("mpmd")


@overload
def jit(fun: Callable, mpmd_mesh: GroupMesh, *args: Any, **kwargs: Any) -> MpmdFunction: ...


@overload
def jit(fun: None = None, *, mpmd_mesh: GroupMesh, **kwargs: Any) -> Callable[[Callable], MpmdFunction]: ...


@api_boundary
def jit(
    fun: Callable | None = None,
    mpmd_mesh: GroupMesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    partial_sums: PartialSums = "replicated",
    gather: Gather = "task",
    *,
    donate_argnames: str | Iterable[str] | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    kwarg_shardings: Mapping[str, Any] | None = None,
    **others: Any,
) -> MpmdFunction | Callable[[Callable], MpmdFunction]:
    """Compiles a train step with a ``treduce`` loop, or another function, for groups of devices.

    The result is called like ``fun`` and computes the same numbers as ``jax.jit(fun)``. It returns at once,
    with ``MpmdArray``s, which stay on the groups and can be passed to the next call. The first call, and each
    call with other shapes, dtypes or static arguments, compiles.

    Args:
      fun: an ordinary function of pytrees of arrays, with ``treduce`` loops whose functions mark their
        stages. A function without ``treduce`` runs on the groups of the ``MpmdArray``s that it is called
        with: averages, casts and norms of a train step's state leave it on its groups. It is compiled again
        for arrays on other groups. Without ``fun``, the result is a decorator.
      mpmd_mesh: the groups: an ``MpmdMesh``, or the result of ``mpmd.launch``; or an
        ``AbstractMpmdMesh``, for which steps are only planned.
      in_specs, out_specs: the names of ``in_shardings`` and ``out_shardings`` in JaxPP.
      static_argnums, static_argnames: hashable arguments that are not arrays.
      donate_argnums, donate_argnames: arguments, such as the state, whose buffers the step may take over;
        they cannot be used after the call.
      partial_sums: the accumulators that hold partial sums over the devices of a group, which are reduced
        once per step, and not in every microbatch. ``"replicated"``: along mesh axes over which the batch is
        sharded and the sum, as a weight and its gradient, is not; this takes no memory. ``"all"``: also
        along axes that shard the sum, as for FSDP; each device then accumulates the whole gradient of its
        stages' weights instead of its shard, and reduces and scatters it once. ``"none"``: no accumulators.
      gather: when weights that are sharded over an axis of the batch, as for FSDP, are gathered along it.
        ``"task"``: in every task that reads them. ``"step"``: once per step and group, before its first
        task; from there to the last task that reads it, each device also holds the gathered weight.
      in_shardings: a pytree prefix of the tuple of (not static) arguments with a ``PartitionSpec`` over the
        axes of a group for each, or a ``NamedSharding``, whose spec counts. ``None`` anywhere: the spec of
        the passed array, if it is an ``MpmdArray`` or has a ``NamedSharding`` with axes that groups have;
        otherwise replicated within the groups that hold it.
      out_shardings: the same for the result. ``None`` anywhere: the spec of the argument that it updates, or
        one that the compiler chooses.
      kwarg_shardings: specs as in ``in_shardings`` of arguments that are passed by name: a pytree prefix of
        each, by its name. Arguments that it lacks have ``None``.
      others: none; other keywords of ``jax.jit`` are an error that names their substitute.

    Raises: ``TypeError`` for arguments of other types, and for other keywords; ``ValueError`` for positions
      and names that ``fun`` does not have, for another ``partial_sums`` or ``gather``, and when both specs
      and shardings are given. When called: ``CompileError`` (a ``ValueError``) for a step that cannot be
      compiled, ``TypeError`` for arguments that are not arrays, and, without a loop, ``ValueError`` for
      ``MpmdArray``s of another mesh.
    """
    check_keywords(others)
    raise_faults(
        None if fun is None else callable_fault("fun", fun),
        mesh_fault("mpmd_mesh", mpmd_mesh),
        *specs_faults("in_specs", in_specs),
        *specs_faults("out_specs", out_specs),
        *argument_faults(
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
        ),
        choice_fault("partial_sums", partial_sums, get_args(PartialSums)),
        choice_fault("gather", gather, get_args(Gather)),
        *specs_faults("in_shardings", in_shardings),
        *specs_faults("out_shardings", out_shardings),
        *keyword_specs_faults(kwarg_shardings),
        title="mpmd.jit: ",
    )
    assert mpmd_mesh is not None, "it was checked"
    options = StepOptions(
        in_specs=specs_or_shardings("in", in_specs, in_shardings),
        out_specs=specs_or_shardings("out", out_specs, out_shardings),
        partial_sums=partial_sums,
        gather=gather,
        kwarg_specs=kwarg_shardings,
    )

    @api_boundary
    def jitted(fun: Callable) -> MpmdFunction:
        raise_faults(callable_fault("fun", fun), title="mpmd.jit: ")
        signature = CallSignature.of(fun, static_argnums, static_argnames, donate_argnums, donate_argnames)
        return MpmdFunction(fun, mpmd_mesh, signature, options)

    return jitted if fun is None else jitted(fun)


mpmd_jit_with_loop = jit
"""The name of ``jit`` for JaxPP's users."""


@dataclasses.dataclass(frozen=True)
class StepOptions:
    in_specs: Any
    out_specs: Any
    partial_sums: PartialSums
    gather: Gather
    kwarg_specs: Mapping[str, Any] | None
    sequence_parallel: SequenceParallel | None = None


class _CallKind(NamedTuple):
    """Calls that one compiled step serves.

    Attributes:
      context: the settings of JAX under which the step is traced.
      specs: how each leaf is sharded; ``None``: all are replicated.
      leaves: the structure, shapes and dtypes of the arguments, as ``Call.key`` has them.
      placements: of a step without a loop, where each leaf is; ``None`` with a loop, which takes them from
        anywhere.
    """

    context: Hashable
    specs: tuple[Spec | None, ...] | None
    leaves: Hashable
    placements: tuple[Placement, ...] | None = None


class MpmdFunction(ShownAsText):
    """The result of ``mpmd.jit``: compiles once for each kind of arguments that it is called with.

    A notebook or a terminal shows its name and the plans that it was compiled to.
    """

    def __init__(self, fun: Callable, mesh: GroupMesh, signature: CallSignature, options: StepOptions):
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._mesh = mesh
        self._signature = signature
        self._options = options
        self.meter = StepMeter.of(fun, mesh)
        self._in_specs = SpecsOfCalls(
            options.in_specs, options.kwarg_specs, mesh.abstract_submeshes, mesh.mpmd_axis_name
        )
        # A mesh that was closed has another runtime when it is used again; nothing here keeps the old one.
        self._loaded: weakref.WeakKeyDictionary[Runtime, dict[_CallKind, LoadedStep]]
        self._loaded = weakref.WeakKeyDictionary()

    def shown(self) -> str:
        plans = [step.plan.shown() for step in self._compiled_steps()]
        compiled = "not compiled yet" if not plans else "compiled to this plan" if len(plans) == 1 else ""
        compiled = compiled or f"compiled to these {len(plans)} plans"
        groups = len(self._mesh.abstract_submeshes)
        return "\n".join([f"mpmd.jit of {self.meter.name} for {groups} groups, {compiled}", *plans])

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    @api_boundary
    def compile(self, *args: Any, **kwargs: Any) -> LoadedStep:
        """Compiles for arguments like these, arrays or ``ShapeDtypeStruct``s, and has the groups load it."""
        return self._load(self._signature.bind(args, kwargs))

    @api_boundary
    def lower(self, *args: Any, **kwargs: Any) -> LoweredStep:
        """Plans the step for arguments like these, arrays or ``ShapeDtypeStruct``s, and proves the plan.

        It needs no devices, and nothing is compiled; the mesh may be an ``AbstractMpmdMesh``. The result has
        ``plan``, ``report()`` and ``simulate()``, and ``mpmd.explain`` explains it; ``compile()`` goes on.
        """
        call = self._signature.bind(args, kwargs)
        compiled, stable = self._compile(call, self._in_specs.of(call), self._held(call))
        return LoweredStep(compiled, stable, self._mesh, self._signature, self.meter.name)

    @api_boundary
    def trace(self, *args: Any, **kwargs: Any) -> TracedFunction:
        """Traces the function as ``jax.jit(fun).trace`` does; ``lower()`` of the result plans the step."""
        signature = self._signature
        static_argnums, static_argnames = signature.meant(signature.static, args, kwargs)
        donate_argnums, donate_argnames = signature.meant(signature.donated, args, kwargs)
        plain = jax.jit(
            self._fun,
            static_argnums=tuple(static_argnums),
            static_argnames=static_argnames,
            donate_argnums=tuple(donate_argnums),
            donate_argnames=donate_argnames,
        )
        lower = functools.partial(self.lower, *args, **kwargs)
        return TracedFunction(plain.trace(*args, **kwargs), lower)

    @api_boundary
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The shapes and dtypes of the result, as ``jax.jit(fun).eval_shape`` has them."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forgets the compiled steps. Groups drop each step that no user holds."""
        self._loaded.clear()

    def _cache_size(self) -> int:
        """The number of steps that were compiled, under JAX's name."""
        return len(self._compiled_steps())

    @api_boundary
    def profile(
        self, *args: Any, steps: int = 1, trace_dir: str | os.PathLike | None = None, **kwargs: Any
    ) -> Profile:
        """Runs steps as ``LoadedStep.profile`` does; compiles first where a call would."""
        step = self.compile(*args, **kwargs)
        return step.profile(*args, steps=steps, trace_dir=trace_dir, **kwargs)

    @api_boundary
    def capture(
        self, *args: Any, task: str, to: str | os.PathLike, mpmd_idx: int | None = None, **kwargs: Any
    ) -> Any:
        """Runs a step and writes a task as ``LoadedStep.capture`` does; compiles first where a call would."""
        step = self.compile(*args, **kwargs)
        return step.capture(*args, task=task, to=to, mpmd_idx=mpmd_idx, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the compiled step, such as ``report``, if the function was compiled just once."""
        if name.startswith("_") or not hasattr(LoadedStep, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        compiled = self._compiled_steps()
        if len(compiled) != 1:
            raise AttributeError(
                f"{name} is that of a step for certain arguments, and this one was compiled for "
                f"{_kinds(compiled)}: step = step.compile(*args) has step.{name}; args are arrays or "
                "ShapeDtypeStructs"
            )
        return getattr(compiled[0], name)

    @property
    def only_step(self) -> LoadedStep:
        """The compiled step. Raises ``ValueError`` when there is none, or several."""
        compiled = self._compiled_steps()
        if len(compiled) != 1:
            raise ValueError(
                f"the function {self.meter.name} was compiled for {_kinds(compiled)}: pass "
                "step.compile(*args)"
            )
        return compiled[0]

    def _compiled_steps(self) -> list[LoadedStep]:
        """The steps of the mesh as it is now; after it was closed and not used again, those of before."""
        loaded = [*self._loaded.items()]
        open_now = [each for each in loaded if not each[0].is_closed]
        steps = {id(step): step for _, of_mesh in open_now or loaded for step in of_mesh.values()}
        return list(steps.values())

    @api_boundary
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            call = self._signature.bind(args, kwargs)
        except TracedArgumentError as refused:
            return described(self.trace(*args, **kwargs), args, kwargs, refused)
        return self._load(call).submit(call)[0]

    def _load(self, call: Call) -> LoadedStep:
        loaded = self._loaded.setdefault(self._mesh.runtime, {})
        anywhere = _CallKind(trace_context(), self._in_specs.of(call), call.key)
        if step := loaded.get(anywhere):
            return step
        # Without a loop, what runs where follows from where the arguments are.
        placements = self._held(call)
        as_held = anywhere._replace(placements=placements)
        if step := loaded.get(as_held):
            return step
        compiled, stable = self._compile(call, anywhere.specs, placements)
        kind = anywhere if compiled.step.loops else as_held
        # Later calls pass the state as the step returns it: with other weak types, and with specs that fit.
        later = kind._replace(leaves=stable.key)
        if later not in loaded:
            loaded[later] = LoadedStep(compiled, stable, self._mesh, self._signature, self.meter)
        loaded[kind] = loaded[later]
        loaded.setdefault(later._replace(specs=compiled.in_specs), loaded[later])
        return loaded[later]

    def _held(self, call: Call) -> tuple[Placement, ...]:
        if not any(isinstance(leaf, MpmdArray) for leaf in call.leaves):
            return (ANYWHERE,) * len(call.leaves)
        return placements_in(self._mesh, call, self._mesh.runtime)

    def _compile(
        self, call: Call, in_specs: Sequence[Spec | None] | None, held: Sequence[Placement]
    ) -> tuple[CompiledStep, Call]:
        """Compiles the step for a call; also returns the description of that call, without arrays.

        The state's weak types may change with the first step: the step is traced as for later ones.
        """
        submeshes, options = self._mesh.abstract_submeshes, self._options
        args, kwargs = jax.tree.unflatten(call.treedef, call.avals)
        out_specs = None
        if options.out_specs is not None:
            out_specs = functools.partial(output_specs, options.out_specs, axes=self._in_specs.axes)
        request = CompileRequest(
            fun=call.function(self._fun),
            args=args,
            kwargs=kwargs,
            submeshes=submeshes,
            in_specs=in_specs,
            are_asked=self._in_specs.are_asked(call),
            out_specs=out_specs,
            donated=call.donated,
            partial_sums=options.partial_sums,
            gather=options.gather,
            sequence_parallel=options.sequence_parallel,
            argument_placements=held,
            parts=self._mesh.parts,
        )
        compiled = compile_step(request)
        compiled = dataclasses.replace(compiled, program=of_part(compiled.program, self._mesh))
        if cut := cut_lines(compiled.program.plan.loops):
            _logger.info("%s: %s", self.meter.name, "\n".join(cut))
        warn_of_mistakes(compiled.step, compiled.program.plan, compiled.program.jaxprs)
        return compiled, call.described_by(tuple(map(as_described, compiled.step.argument_leaves)))


def with_sequence_parallel(step: MpmdFunction, sequence_parallel: SequenceParallel | None) -> MpmdFunction:
    """The function with values between tensor-parallel regions sharded, not compiled yet."""
    options = dataclasses.replace(step._options, sequence_parallel=sequence_parallel)
    return MpmdFunction(step._fun, step._mesh, step._signature, options)


def _kinds(compiled: Sequence[LoadedStep]) -> str:
    return f"{len(compiled)} kinds of arguments" if compiled else "no arguments yet"

"""Chooses stages, shardings, schedule and microbatches for a step and a cluster: ``mpmd.plan``."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpmd.arguments.keywords import argument_faults
from mpmd.arguments.specs import keyword_specs_faults, specs_faults
from mpmd.compat import api_boundary
from mpmd.planner.candidate import Row
from mpmd.planner.choice import Choice
from mpmd.planner.constraints import Constraints
from mpmd.planner.layer_profile import Kind
from mpmd.planner.pools import AnyCluster, Pools
from mpmd.planner.reasons import StepDoesNotFit, shortage, slower_because
from mpmd.planner.rerank import PlanningLimits, Ranking, rerank
from mpmd.planner.search.attention_note import attention_note
from mpmd.planner.search.multi_loop import loops_as_written, search_loops
from mpmd.planner.trials.realize import decisions_of
from mpmd.planner.trials.trials import StepSpec, Trials
from mpmd.schedules import Schedule
from mpmd.step.jit import MpmdFunction
from mpmd.util.garbage import without_garbage_collection
from mpmd.util.tables import human_bytes
from mpmd.validation import Fault, callable_fault, int_fault, is_int, number_fault, raise_faults, type_fault

_logger = logging.getLogger(__name__)


@api_boundary
@without_garbage_collection()
def plan(
    step: Callable,
    *args: Any,
    cluster: AnyCluster,
    kwargs: Mapping[str, Any] | None = None,
    groups: int | None = None,
    num_layers: int | None = None,
    num_stages: int | None = None,
    layers_per_stage: Sequence[int] | None = None,
    schedule: Schedule | type[Schedule] | str | None = None,
    num_microbatches: int | None = None,
    submesh: Mapping[Kind, int] | Sequence[Mapping[Kind, int]] | None = None,
    remat: bool | str | Sequence[bool | str] | None = None,
    fsdp: bool | None = None,
    sequence_parallel: bool | None = None,
    in_shardings: Any = None,
    kwarg_shardings: Mapping[str, Any] | None = None,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    donate_argnums: int | Iterable[int] | None = None,
    simulate: int | None = None,
    seconds: float | None = None,
    measure: int = 0,
    memory_margin: float = 0.08,
) -> Choice:
    """Chooses how a cluster runs a train step, and predicts the cost.

    ::

        choice = mpmd.plan(train_step, state, batch, cluster=mpmd.Cluster(nodes=2, devices_per_node=8, ...))
        print(choice)                                     # the table, and why each way lost
        with mpmd.launch(**choice.launch) as mesh:
            step = choice.jit(mesh)                       # cut, scheduled and sharded as chosen

    The step has a ``treduce``, or ``value_and_grad``. Its own decisions stay: its stages, where it has
    marks, and its microbatches, where it cuts them. Open decisions are made: the stages of a loss under
    ``mpmd.auto_marks``, and ``mpmd.microbatches(batch)`` without a number. The schedule of a ``treduce`` is
    replaced. Several loops share the groups, and each has its own stages and schedule. For a step without a
    loop only the devices of one group and the shardings are chosen. Formulas rank all candidates; the best
    of each kind are planned, and the plans simulated.

    Args:
      step: as ``mpmd.jit`` takes it; traced once for each candidate that is planned.
      args: its positional arguments, arrays or ``ShapeDtypeStruct``s.
      cluster: the devices, their speed, memory and links.
      kwargs: arguments that the step is called with by name.
      num_layers: the number of layers into which a function under ``mpmd.auto_marks`` is divided, and of
        which stages consist; by default as many as are found.
      groups, num_stages, layers_per_stage, schedule, num_microbatches, submesh, remat, fsdp,
        sequence_parallel: constraints on the choice; ``None`` is open. A schedule may be one of a size, or a
        family, by class or name. ``submesh`` has the number of devices of each group along ``data``,
        ``model`` and ``sequence``; or is a list with such a mapping for each group. ``remat`` is a policy of
        ``mpmd.Remat`` or its name, ``True`` for full rematerialisation, ``False`` for none, or a list with
        one for each stage. ``sequence_parallel`` divides values between tensor-parallel regions
        over ``model``, too. In a step with several loops, constraints hold for each.
      in_shardings: a pytree prefix of the positional arguments with a ``PartitionSpec`` over these axes
        where it is fixed, ``None`` where it is open.
      kwarg_shardings: the same for arguments that are passed by name, by name.
      static_argnums, static_argnames: as in ``mpmd.jit``.
      donate_argnums: the arguments that the step may take over; by default the arguments that it returns
      updated.
      simulate: the number of candidates that are planned and simulated, at least ``measure``: the simplest
        that by the formulas may be as fast as the fastest, the fastest, the fastest of each other kind, such
        as one group, equal groups or groups that differ, and the next ones. By default five at most, and
        only candidates that would be chosen by their time by the formulas. More are planned only until one
        fits.
      seconds: the time after which no further candidate is planned once one fits. By default no clock
        decides, so that the answer does not depend on the machine.
      measure: the number of the best candidates whose tasks are compiled and run, without a pipeline, on the
        devices of this process, which have to be of the cluster's kind. Up to three times as many are
        measured, as long as one that is not measured may be as fast: its simulated time counts, multiplied by
        the median of measured over simulated times. Each group runs by itself, so on CPUs the process should
        have the threads of a node, or for groups on Ray the threads of one group (``NPROC``).
      memory_margin: the share of the memory of a device that stays free, for what no plan knows.

    Raises: ``TypeError`` for arguments of other types; ``ValueError`` for values that are not valid, for
      constraints that conflict with one another or the step, for a step that cannot be cut as asked, and for
      one that fits nowhere, with the missing memory and the nearest that would fit; and as ``mpmd.jit`` and
      its ``lower``.
    """
    raise_faults(
        *_faults(step, cluster, kwargs, simulate, seconds, measure, memory_margin),
        *specs_faults("in_shardings", in_shardings),
        *keyword_specs_faults(kwarg_shardings),
        *argument_faults(
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
        ),
        title="mpmd.plan: ",
    )
    constraints = Constraints.of(
        groups=groups,
        num_layers=num_layers,
        num_stages=num_stages,
        layers_per_stage=layers_per_stage,
        schedule=schedule,
        num_microbatches=num_microbatches,
        submesh=submesh,
        remat=remat,
        fsdp=fsdp,
        sequence_parallel=sequence_parallel,
    )
    step_spec = StepSpec.of(
        step,
        args,
        kwargs or {},
        in_shardings,
        kwarg_shardings,
        static_argnums,
        static_argnames,
        donate_argnums,
    )
    usable = cluster.with_memory(1 - memory_margin)
    trials = Trials(step_spec, usable, constraints.num_layers)
    try:
        ranking = rerank(
            functools.partial(_search, trials, constraints),
            trials.realize,
            trials.measure,
            trials.cluster,
            PlanningLimits(simulate, seconds, measure),
        )
    except StepDoesNotFit as error:
        if not memory_margin:
            raise
        free = " and ".join(
            f"{human_bytes(pool.memory - less.memory)} free, of the {human_bytes(pool.memory)} of a device"
            for pool, less in zip(cluster.pools, usable.pools, strict=True)
        )
        raise ValueError(f"{error}; memory_margin={memory_margin} leaves {free}") from error
    return _choice(step_spec, trials, cluster, ranking, memory_margin)


def _search(trials: Trials, constraints: Constraints, share: float) -> tuple[Row, ...]:
    """Returns the rows by formula for a share of the memory, including the row of the schedules that the
    step is written with."""
    cluster = trials.cluster.with_memory(share)
    profiles = trials.profiles
    _logger.debug("searching among candidates by the formulas")
    rows = search_loops(profiles, cluster, [constraints] * len(profiles))
    written = loops_as_written(profiles, cluster, trials.written_schedules, constraints)
    if written is None or rows[0].candidate == written.candidate:
        return rows
    reason = shortage(written, cluster) or slower_because(written, rows[0])
    others = [row for row in rows[1:] if row.label or row.candidate != written.candidate]
    return rows[0], dataclasses.replace(written, reason=reason), *others


def _choice(
    step_spec: StepSpec, trials: Trials, cluster: AnyCluster, ranking: Ranking, memory_margin: float
) -> Choice:
    candidate = ranking.rows[0].candidate
    in_shardings, kwarg_shardings = trials.shardings(candidate)
    return Choice(
        rows=ranking.rows,
        cluster=cluster,
        examples=trials.profiles[0].rows,
        decisions=decisions_of(candidate, trials.profiles),
        in_shardings=in_shardings,
        kwarg_shardings=kwarg_shardings,
        donate_argnums=trials.donate_argnums,
        memory_margin=memory_margin,
        notes=(*ranking.notes, *trials.not_priced, *attention_note(trials.profiles, trials.cluster.pools[0])),
        _step=step_spec.step,
        _static=step_spec.static,
        _realized=ranking.winner,
        _profiles=trials.profiles,
    )


def _faults(
    step: Any, cluster: Any, kwargs: Any, simulate: Any, seconds: Any, measure: Any, memory_margin: Any
) -> Iterator[Fault | None]:
    yield callable_fault("step", step)
    if isinstance(step, MpmdFunction):
        yield TypeError(
            "step must be the train step itself, not what mpmd.jit has made of it: choice.jit compiles it"
        )
    what = "an mpmd.Cluster, such as mpmd.Cluster.from_ray() or mpmd.Cluster(nodes=2, ...)"
    yield type_fault("cluster", cluster, AnyCluster, what)
    what = "a dict of the arguments that are passed by name"
    yield type_fault("kwargs", kwargs, Mapping, what, optional=True)
    yield int_fault("simulate", simulate, optional=True)
    yield number_fault("seconds", seconds, above=0, optional=True)
    yield int_fault("measure", measure, 0)
    if isinstance(cluster, Pools) and is_int(measure) and measure:
        yield ValueError(
            f"measure={measure} runs tasks on the devices of this process, which are of one kind, and the "
            f"cluster has {' and '.join(cluster.pool_names)}"
        )
    margin_fault = number_fault("memory_margin", memory_margin, "a share of the memory,", least=0)
    yield margin_fault
    if margin_fault is None and memory_margin >= 1:
        yield ValueError(f"memory_margin must be less than 1, not {memory_margin}")

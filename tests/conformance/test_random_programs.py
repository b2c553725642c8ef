"""Random programs compute what plain JAX computes, with plans that move and keep no more than they need."""

import pytest
from hypothesis import given

from mpmd.ir.plan import Free, HostCall, Recv, Run, Send
from mpmd.memory.sizes import sizes_on_devices
from tests.support.effort import costly
from tests.support.models import batch
from tests.support.parity import assert_parity, assert_parity_on, mesh_of
from tests.support.random_programs import scans, slices
from tests.support.random_programs.description import Program, Stage
from tests.support.random_programs.draw import programs, programs_of_two_loops
from tests.support.random_programs.outside import arguments_of, axes_of, options_of, step_of

pytestmark = [
    pytest.mark.usefixtures("quick_compiles"),
    pytest.mark.filterwarnings("ignore:the loop at:mpmd.PerformanceWarning"),
]


def check(program):
    """Runs a program both ways, and looks at its plan."""
    step, (state, batch) = step_of(program), arguments_of(program)
    donated = {"": (), "state": 0, "all": (0, 1)}[program.donate]
    with mesh_of(program.groups, **axes_of(program)) as mesh:
        loaded = assert_parity_on(
            mesh,
            step,
            state,
            batch,
            tolerance=1e-4 if program.precise else 0.05,
            donate_argnums=donated,
            **options_of(program, state, batch),
        )
        check_plan(loaded.plan, [group.memory.live_bytes for group in loaded.report().groups])


def check_plan(plan, peak_bytes):
    """What a group receives it reads, it keeps nothing longer than needed, and its peak is as reported."""
    for program, peak in zip(plan.programs, peak_bytes, strict=True):
        group, instructions = f"group {program.mpmd_idx}", program.instructions
        sizes = sizes_on_devices(plan, program.mpmd_idx)
        results = {leaf.name for leaf in plan.outputs if program.mpmd_idx in leaf.mpmd_idxs}
        kept = results | {leaf.name for leaf in plan.inputs if not leaf.donated}
        kept |= {leaf.name for leaf in plan.constants}
        received = [name for i in instructions if isinstance(i, Recv) for name in i.values]
        assert set(received) <= results.union(*map(reads, instructions)), (
            f"{group} receives and does not read"
        )
        sent = [(name, i.dst) for i in instructions if isinstance(i, Send) for name in i.values]
        assert len(sent) == len(set(sent)), f"{group} sends a value twice"
        alive = [set(plan.resident(program.mpmd_idx))]
        for instruction in instructions:
            alive.append(alive_after(plan, instruction, alive[-1]))
        held = in_memory(instructions, alive)
        most = max(sum(sizes[name] for name in names) for names in held)
        assert most == peak, f"{group} holds {most} bytes, and its peak is {peak}"
        needed = kept
        for i in reversed(range(len(instructions))):
            # A free comes right after the instruction that is the last to need the value.
            freed = instructions[i + 1 : i + 2] and isinstance(instructions[i + 1], Free)
            assert freed or alive[i + 1] <= needed, f"{group} keeps {alive[i + 1] - needed}"
            needed = needed | reads(instructions[i])


def reads(instruction):
    match instruction:
        case Run(inputs=values) | Send(values=values) | HostCall(values=values):
            return set(values)
    return set()


def alive_after(plan, instruction, alive):
    match instruction:
        case Run(_, name, inputs, outputs):
            return alive - {inputs[i] for i in plan.executable(name).donated} | set(outputs)
        case Recv(values):
            return alive | set(values)
        case Free(values):
            return alive - set(values)
    return alive


def in_memory(instructions, alive):
    """Of what is alive before and after each instruction, all but the messages that nobody has used yet."""
    waiting = {}
    held = [alive[0]]
    for instruction, names in zip(instructions, alive[1:], strict=True):
        used = instruction.inputs if isinstance(instruction, Run) else instruction.values
        if isinstance(instruction, Recv):
            waiting |= dict.fromkeys(instruction.values, instruction)
        else:
            for recv in {waiting[name] for name in used if name in waiting}:
                for name in recv.values:
                    del waiting[name]
        held.append(names - waiting.keys())
    return [*held, alive[-1]]


@costly
@given(programs().filter(lambda program: not axes_of(program)))
def test_random_programs(program):
    check(program)


@costly
@given(programs_of_two_loops().filter(lambda program: not axes_of(program)))
def test_random_programs_of_two_loops(program):
    check(program)


def check_layers(program, step, state, data, groups, of_half=0.05):
    assert_parity(
        step,
        state,
        *data,
        mesh=mesh_of(groups),
        tolerance=of_half if program.half else 1e-4,
        donate_argnums=0 if program.donate else (),
    )


@costly
@given(scans.scanned_programs())
def test_random_scans(program):
    check_layers(program, scans.scanned_step(program), scans.state_of(program), batch(2), program.stages)


@costly
@given(slices.sliced_programs())
def test_random_slices(program):
    step, groups = slices.sliced_step(program), program.make_schedule().mpmd_dim
    # One unit in the last place of bfloat16 weights moves the results of plain JAX by as much.
    check_layers(program, step, slices.state_of(program), slices.data_of(program), groups, of_half=0.25)


def test_a_norm_of_gradients_that_no_stage_computes():
    """The loss has a penalty on weights that no stage reads: their gradients are clipped by their norm."""
    check(
        Program(
            stages=(Stage(), Stage()), groups=2, l2=True, gradients_inside="clip", inside=("scale", "square")
        )
    )


@pytest.mark.slow
@pytest.mark.timeout(0)
@costly
@given(programs() | programs_of_two_loops())
def test_many_random_programs(program):
    check(program)

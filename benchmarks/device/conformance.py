"""The section of conformance: programs of the tests, on four groups that share a device."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import jax

from benchmarks.device.groups import local_ray, on_ray
from benchmarks.device.outcome import Findings
from benchmarks.device.settings import Settings
from benchmarks.measure import Table
from tests.support.parity import assert_parity_on
from tests.support.programs import PROGRAMS
from tests.support.programs.table import Program

GROUPS = 4
RESERVE_SECONDS = 40.0
"""So long before the end no other program begins, because that one has to end, too."""

COMPILE_QUICKLY = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
"""The sizes of the programs are tiny."""

NAMES = """
mlp_under_a_schedule[GPipe]
mlp_under_a_schedule[Std1F1B]
several_stages_on_a_group
a_stage_without_parameters[first]
only_some_parameters_are_trained[head]
skip_over_a_stage[before]
stages_of_different_widths_and_ranks
auxiliary_losses[beside the anchor]
constants_from_outside[numpy]
tied_embeddings[adamw]
a_small_shared_parameter[scalar]
one_array_with_the_weights_of_all_stages[indexed]
shared_weights_under_another_operation[mean]
trained_with[clipped]
trained_with[accumulating]
gradients_as_one_vector
gradients_divided_by_a_token_count[added up]
loss_scaling[finite, decide_with_where]
literal_constant_duplicated_and_forwarded_outputs
gradients_alone
inference
auxiliary_output_under[concat along 1]
auxiliary_output_under[histogram]
dropout_with_a_key_folded_with_the_index[typed]
dropout_with_the_key_in_the_anchor[raw]
checkpoint[dots]
scan_over_layers[plain]
cond[of data]
custom_vjp
transformer_with_rotary_embeddings_and_causal_mask
mixture_of_experts[top 2]
u_net
in_order[interleaved]
in_order[zero bubble]
counts_and_keys
embedding_before_the_loop
parameters_of_half_precision[bfloat16]
trained_with[one rate per kind]
scanned_layers_with[clipped adamw]
layers_taken_by_a_counter[fori_loop]
""".strip().splitlines()


def programs() -> list[Program]:
    """The programs of ``NAMES``, each for at most ``GROUPS`` groups of one device."""
    by_name = {program.name: program for program in PROGRAMS}
    return [by_name[name] for name in NAMES]


def run(settings: Settings) -> Findings:
    """Each program once; those that there is no time for are named."""
    # By default GPUs round what they multiply to fewer bits than float32 has; tolerances are for float32.
    jax.config.update("jax_default_matmul_precision", "highest")
    end = time.perf_counter() + settings.seconds - RESERVE_SECONDS
    environment = {"env_vars": COMPILE_QUICKLY if settings.is_gpu else {}}
    chosen = programs()
    with local_ray(settings), on_ray(settings, GROUPS, gpus_per_group=0.25, runtime_env=environment) as mesh:
        found = {}
        for program in chosen:
            if time.perf_counter() < end:
                found[program.name] = failure_of(program, mesh)
    return findings_of([program.name for program in chosen], found)


def failure_of(program: Program, mesh) -> str:
    """The fault of a program on these groups; empty if it computes what ``jax.jit`` computes."""
    case = program.case()
    options = {"donate_argnums": 0, **case.options}
    try:
        with case.warned():
            assert_parity_on(
                mesh,
                case.step,
                case.state,
                *case.batch,
                steps=case.steps,
                tolerance=case.tolerance,
                **options,
            )
    except Exception as error:  # whatever it is, it is what is measured here
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {' '.join(lines[:6])}"[:400]
    return ""


def findings_of(names: Sequence[str], found: Mapping[str, str]) -> Findings:
    """The number of programs that pass, and the names of the others."""
    faults = tuple(f"{name}: {failure}" for name, failure in found.items() if failure)
    left = [name for name in names if name not in found]
    rows = (
        ("compute what jax.jit computes", str(len(found) - len(faults))),
        ("do not", str(len(faults))),
        ("not begun, for lack of time", str(len(left))),
    )
    table = Table(
        f"{len(names)} programs on {GROUPS} groups, each with a quarter of a device", ("", "programs"), rows
    )
    return Findings((table,), {"failures": dict(found), "not begun": left}, faults)

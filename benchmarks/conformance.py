"""Programs of the tests on four groups that share a device; each computes what ``jax.jit`` computes."""

from __future__ import annotations

import time
from typing import Any

import jax

from benchmarks.__main__ import DEVICE_LIMITS
from benchmarks.frame import Rows, Setup
from tests.support.parity import assert_case_on
from tests.support.programs import PROGRAMS
from tests.support.programs.table import Program

GROUPS = 4
RESERVE_SECONDS = 40.0
"""Seconds before the limit from which on no program begins, because the last one has to end, too."""

COMPILE_QUICKLY = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
"""The sizes of the programs are tiny."""

NAMES = """
mlp_under_a_schedule[GPipe]
mlp_under_a_schedule[Std1F1B]
a_stage_without_parameters[first]
skip_over_a_stage[before]
auxiliary_losses[beside the anchor]
constants_from_outside[numpy]
tied_embeddings[adamw]
one_array_with_the_weights_of_all_stages[indexed]
shared_weights_under_another_operation[mean]
trained_with[clipped]
trained_with[accumulating]
gradients_as_one_vector
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
u_net
in_order[interleaved]
in_order[zero bubble]
counts_and_keys
parameters_of_half_precision[bfloat16]
trained_with[one rate per kind]
scanned_layers_with[clipped adamw]
integers_that_come_to_depend_on_the_data[halting]
schedules_of_a_scan[interleaved]
frozen_stages[(0,)]
a_weight_used_by_three_stages_of_four
the_whole_model_before_the_loop
gradients_compared_across_stages
loss_scaling[infinite, decide_with_cond]
calls_that_feed_one_another[self-conditioning]
""".strip().splitlines()


def run(setup: Setup) -> Rows:
    """Runs each program once; on a device, those for which there is time."""
    # By default GPUs round operands of products to fewer bits than float32 has; tolerances are for float32.
    jax.config.update("jax_default_matmul_precision", "highest")
    limit = DEVICE_LIMITS["conformance"] * setup.options.patience - RESERVE_SECONDS
    end = time.perf_counter() + limit if setup.options.device else float("inf")
    environment = {"env_vars": COMPILE_QUICKLY if setup.has_gpus else {}}
    by_name = {program.name: program for program in PROGRAMS}
    failures = []
    with setup.launch({"stage": GROUPS}, "stage", cpus_per_group=0.5, runtime_env=environment) as mesh:
        for name in setup.cases(NAMES, NAMES):
            failure = failure_of(by_name[name], mesh) if time.perf_counter() < end else "not begun"
            failures += [name] if failure not in ("", "not begun") else []
            yield "Programs on groups that share a device", {"": name, "failure": failure}
    if failures:
        raise RuntimeError(f"compute something else than jax.jit: {', '.join(failures)}")


def failure_of(program: Program, mesh: Any) -> str:
    """The fault of a program on these groups; empty if it computes what ``jax.jit`` computes."""
    case = program.case()
    try:
        assert_case_on(mesh, case, donate_argnums=0)
    except Exception as error:  # whatever it is, it is the result of this benchmark
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {' '.join(lines[:6])}"[:400]
    return ""

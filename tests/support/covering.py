"""The programs that stand for all others: together they run each line of the compiler that any of them runs.

``python -m tests.support.covering`` measures every program, which takes some minutes, and writes ``COVERING``
anew: time and again the program with the most lines, for what it costs, that none of those before it has.
"""

import json
import re
import warnings
from pathlib import Path

import coverage
import jax

import mpmd
from mpmd.compiler.jaxprs.equations import all_eqns
from tests.support.parity import mesh_of
from tests.support.programs import PROGRAMS

ROOT = Path(__file__).parents[2]
MEASURED = ("compiler", "language", "ir", "step", "verify")
"""The packages of ``mpmd`` that make and check a plan."""

COVERING = (
    "a_callback_in_a_scan",
    "a_loop_that_no_result_needs",
    "a_network_with_skips_from_scan_to_scan",
    "a_state_that_is_never_updated",
    "a_weight_with_a_penalty_whose_gradient_comes_from_a_later_stage",
    "an_encoder_and_a_decoder[encoder]",
    "an_optimizer_that_knows_the_hessian",
    "arrays_of_few_bits[int2]",
    "auxiliary_output_concatenated_and_reduced[mean]",
    "auxiliary_output_concatenated_and_reduced[weights]",
    "auxiliary_output_under[max of booleans]",
    "auxiliary_output_under[max of integers]",
    "classes_of_all_layers",
    "constants_that_are_carried",
    "constraints_within_stages",
    "counts_and_keys",
    "dense_layers[2]",
    "depth_dependent_scales",
    "derivative_through_marks[only_the_slope]",
    "diffusion",
    "dropout_in_a_scan",
    "equinox_scanned_modules",
    "evaluation_with_stacked_outputs",
    "flax_nnx_scan",
    "fully_sharded_and_gathered_once[schedule]",
    "fused_tasks_that_accumulate",
    "gradient_penalty_of_scanned_layers",
    "gradients_divided_by_a_token_count",
    "in_order[zero bubble]",
    "linearised_and_transposed_by_hand",
    "loops_that_cut_one_stack_otherwise",
    "losses_of_two_critics_and_an_actor[one stage]",
    "mixture_of_experts_on_a_mesh_of_its_own",
    "nnx_with_an_optimizer_and_metrics",
    "numbers_of_python_everywhere",
    "of_scanned_layers[running]",
    "only_the_last_layers_are_trained",
    "over_a_sharded_batch",
    "parameters_that_are_numbers",
    "prints_in_both_loops_and_between",
    "scales_from_a_history_of_each_layer",
    "scanned_between_embedding_and_head[plain]",
    "scanned_between_embedding_and_head[rematerialised]",
    "scanned_between_embedding_and_head[under jax.checkpoint]",
    "scanned_layers_with[apply_if_finite]",
    "scanned_layers_with[muon]",
    "scans_without_a_backward[forward]",
    "several_scans_over_one_stack",
    "slices_of_scans_with_marks",
    "slices_on_groups_of_two_devices[rows]",
    "slices_with_a_count_that_each_microbatch_carries",
    "specs_of_the_results",
    "stages_with[convolution]",
    "the_second_loop_depends_on_a_norm_of_all_gradients",
    "tokens_pruned_between_stages",
    "trained_with[noisy]",
    "vmapped_scan",
    "words_masks_dropout_and_aux",
)


def lines_and_costs_of_programs():
    """The lines that compiling each program runs, pairs of a file and a number, and its cost; each by name.

    The cost is the number of operations that XLA compiles, for which most of the time of a test goes.
    """
    costs = {}
    measured = coverage.Coverage(
        data_file=None, config_file=False, include=[str(ROOT / "mpmd" / name / "*") for name in MEASURED]
    )
    with warnings.catch_warnings(), measured.collect():
        warnings.simplefilter("ignore")
        for program in PROGRAMS:
            measured.switch_context(program.name)
            case = program.case()
            mesh = mesh_of(case.groups, **case.axes)
            lowered = mpmd.jit(case.step, mesh, **case.options).lower(case.state, *case.batch)
            bodies = {id(body): body for body in lowered.compiled.program.jaxprs.values()}
            costs[program.name] = sum(len([*all_eqns(body.eqns)]) for body in bodies.values())
    data = measured.get_data()
    lines = {program.name: set() for program in PROGRAMS}
    for file in data.measured_files():
        for number, names in data.contexts_by_lineno(file).items():
            for name in names:
                lines[name].add((file, number))
    return lines, costs


def cover(lines, costs):
    """The names of programs that run all lines, by the greedy rule; of equal ones the first."""
    left, chosen = set().union(*lines.values()), []
    while left:
        chosen.append(max(lines, key=lambda name: len(lines[name] & left) / costs[name]))
        left -= lines[chosen[-1]]
    return sorted(chosen)


def main():
    jax.config.update("jax_num_cpu_devices", 8)  # as for tests
    names = "".join(f"    {json.dumps(name)},\n" for name in cover(*lines_and_costs_of_programs()))
    source = Path(__file__)
    text = re.sub(
        r"(?ms)^COVERING = \(.*?^\)$", lambda _: f"COVERING = (\n{names})", source.read_text(), count=1
    )
    source.write_text(text)


if __name__ == "__main__":
    main()

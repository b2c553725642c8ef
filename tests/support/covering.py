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
    "a_map_over_layers",
    "a_network_with_skips_from_scan_to_scan",
    "a_state_that_is_never_updated",
    "an_encoder_and_a_decoder[encoder]",
    "an_optimizer_that_knows_the_hessian",
    "auxiliary_output_concatenated_and_reduced[weights]",
    "auxiliary_output_under[max of booleans]",
    "auxiliary_output_under[max of integers]",
    "classes_of_all_layers",
    "complex_parameters[computed again]",
    "constraints_within_stages",
    "counts_and_keys",
    "dense_layers[2]",
    "depth_dependent_scales",
    "diffusion",
    "dropout_in_a_scan",
    "equinox_scanned_modules[checkpointed]",
    "evaluation_with_stacked_outputs",
    "flax_linen_scan[axis 1]",
    "fully_sharded_and_gathered_once[schedule]",
    "fused_tasks_that_accumulate",
    "gradient_penalty_of_scanned_layers",
    "gradients_divided_by_a_token_count",
    "linearised_and_transposed_by_hand",
    "literal_constant_duplicated_and_forwarded_outputs",
    "loops_that_cut_one_stack_otherwise",
    "losses_of_two_critics_and_an_actor[one stage]",
    "mixture_of_experts_on_a_mesh_of_its_own[all_to_all]",
    "mlp_under_a_schedule[GPipe]",
    "nnx_with_an_optimizer_and_metrics",
    "numbers_of_python_everywhere",
    "of_scanned_layers[computed again]",
    "only_the_last_layers_are_trained",
    "parameters_that_are_numbers",
    "prints_in_both_loops_and_between",
    "scales_from_a_history_of_each_layer",
    "scanned_between_embedding_and_head[rematerialised]",
    "scanned_between_embedding_and_head[under jax.checkpoint]",
    "scanned_layers_with[apply_if_finite]",
    "scanned_layers_with[muon]",
    "several_scans_over_one_stack",
    "slices_on_groups_of_two_devices[rows]",
    "slices_with_document_masks",
    "specs_of_the_results",
    "stages_that_end_within_two_scans",
    "stages_with[convolution]",
    "the_second_loop_depends_on_a_norm_of_all_gradients",
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

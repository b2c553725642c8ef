"""The groups that take part in a step."""

from mpmd.ir.plan import ConstantLeaf, InputLeaf, OutputLeaf, Plan


def participants(plan: Plan) -> tuple[int, ...]:
    """The groups that run something, or have arguments or results; others are not asked for the step.

    Group 0, if there is none: somebody has to answer.
    """
    leaves: list[InputLeaf | ConstantLeaf | OutputLeaf] = [*plan.inputs, *plan.constants, *plan.outputs]
    holding = {group for leaf in leaves for group in leaf.mpmd_idxs}
    groups = (p.mpmd_idx for p in plan.programs if p.instructions or p.mpmd_idx in holding)
    return tuple(groups) or (0,)

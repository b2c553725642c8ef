"""The groups that take part in a step."""

from mpmd.ir.plan import ConstantLeaf, InputLeaf, OutputLeaf, Plan


def participants(plan: Plan) -> tuple[int, ...]:
    """The groups that the driver sends a step to: groups with instructions, arguments or results.

    Without such a group it is group 0, because the driver waits for an answer.
    """
    leaves: list[InputLeaf | ConstantLeaf | OutputLeaf] = [*plan.inputs, *plan.constants, *plan.outputs]
    holding = {group for leaf in leaves for group in leaf.mpmd_idxs}
    groups = (p.mpmd_idx for p in plan.programs if p.instructions or p.mpmd_idx in holding)
    return tuple(groups) or (0,)

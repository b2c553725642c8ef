"""The memory of a compiled step, in the fields of JAX's ``CompiledMemoryStats``."""

from __future__ import annotations

from types import SimpleNamespace

from mpmd.explanation import Report
from mpmd.ir.plan import Plan
from mpmd.memory import sizes_on_devices


def memory_stats(plan: Plan, report: Report) -> SimpleNamespace:
    """Temporaries are all but arguments and results at the worst moment. Nothing is in the memory of the
    host."""
    group = max(report.groups, key=lambda group: group.peak_bytes)
    nbytes, inputs = sizes_on_devices(plan, group.mpmd_idx), plan.inputs_of(group.mpmd_idx).values()
    argument = sum(nbytes[name] for name in plan.resident(group.mpmd_idx))
    output = sum(nbytes[leaf.name] for leaf in plan.outputs_of(group.mpmd_idx).values())
    alias = sum(nbytes[leaf.name] for leaf in inputs if leaf.donated and leaf.name)
    temp = max(0, group.peak_bytes - argument - output + alias)
    code = sum(executable.memory.code for executable in group.executables if executable.memory)
    sizes = {"argument": argument, "output": output, "alias": alias, "temp": temp, "generated_code": code}
    return SimpleNamespace(
        peak_memory_in_bytes=group.peak_bytes,
        **{f"{kind}_size_in_bytes": size for kind, size in sizes.items()},
        **{f"host_{kind}_size_in_bytes": 0 for kind in sizes},
    )

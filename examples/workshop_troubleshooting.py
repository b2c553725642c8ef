"""The Workshop guide's troubleshooting for ``workshop_strategies.py``: a slow step, or too much memory."""

import collections
import contextlib
import pathlib
import tempfile
from collections.abc import Sequence

import workshop_measure

import mpmd
from mpmd.ir.events import Event, Wait


def troubleshoot(choice: mpmd.Choice, step, state, batch: Sequence, output: pathlib.Path | None) -> None:
    """Profiles a step, and prints what answers the guide's questions.

    Args:
      output: where the profile is drawn and the traces are kept, if anywhere.
    """
    with contextlib.ExitStack() as stack:
        folder = output or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        _, events = step.profile(state, *batch, trace_dir=folder)
        collectives = mpmd.collective_seconds(folder)
    prediction = choice.best.prediction
    span = max(event.end for event in events) - min(event.start for event in events)
    shares = workshop_measure.shares_text(collectives, span)
    print(f"\nIs it communication? Of {span * 1e3:.1f} ms, between devices of a group:", end=" ")
    print(f"{shares}; predicted {prediction.communication:.1%}. Between groups, in a step:")
    for edge in mpmd.explain(step).edges:
        print(f"group {edge.src} sends group {edge.dst} {edge.nbytes / 2**20:.3f} MiB")
    print(f"Measured here, shares of the step: {groups_text(events, span)}")
    print("\nIs the load balanced? Measured for a microbatch, and predicted:")
    measured = workshop_measure.stage_seconds(events)
    for stage, (here, there) in enumerate(zip(measured, prediction.stage_seconds, strict=True)):
        print(f"stage {stage}: {here * 1e3:.2f} ms ({there * 1e3:.2f} ms)")
    print(f"\nWhat takes memory, and what else is conspicuous?\n{step.report()}\n")
    if output:
        mpmd.render.draw_timeline(events, output / "step.svg", "one step", ideal=choice.simulation)
        mpmd.render.chrome_trace(events, output / "step.json")
        print(f"the profile beside the prediction: {output}/step.svg; for Perfetto: {output}/step.json")
        print(f"the traces of all processes, for XProf: {output}\n")


def groups_text(events: Sequence[Event], span: float) -> str:
    """The share of a step in which each group computes, and in which it waits for others."""
    computes, waits = collections.Counter(), collections.Counter()
    for event in events:
        (waits if isinstance(event.activity, Wait) else computes)[event.mpmd_idx] += event.duration
    return ", ".join(
        f"group {group} computes {computes[group] / span:.0%}, waits for messages {waits[group] / span:.0%}"
        for group in sorted(computes)
    )

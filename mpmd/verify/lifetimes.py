"""Follows the values that a group holds, from instruction to instruction."""

from __future__ import annotations

from collections.abc import Collection

from mpmd.ir.plan import (
    Aval,
    Executable,
    Free,
    GroupProgram,
    HostCall,
    Instruction,
    Name,
    OutputLeaf,
    Plan,
    Recv,
    Run,
    Send,
)


def check_lifetimes(plan: Plan, program: GroupProgram) -> list[str]:
    """Returns the faults of a group's program, from the values it holds before the step to those after it.

    Every value is defined once, before its use, and has the shape and dtype that its readers were compiled
    for. Only values that the step may give up are freed or donated, and they are not used afterwards. A
    donated value is no other input of the same run, and was not sent: its message might still be in flight.
    At the end the group holds only the step's results and the values that the caller keeps.
    """
    lifetimes = _Lifetimes(plan, program)
    for position, instruction in enumerate(program.instructions):
        lifetimes.check_instruction(position, instruction)
    lifetimes.end(plan.outputs_of(program.mpmd_idx).values())
    return lifetimes.faults


class _Lifetimes:
    """The values of one group after the instructions so far.

    ``faults`` has the faults so far. ``_kept`` are the values that the caller keeps, and ``_sent`` the
    positions of the sends of values.
    """

    def __init__(self, plan: Plan, program: GroupProgram):
        self.faults: list[str] = []
        self._mpmd_idx = program.mpmd_idx
        self._plan = plan
        self._avals = plan.avals()
        self._held = plan.resident(program.mpmd_idx)
        given_up = {leaf.name for leaf in plan.inputs if leaf.donated}
        self._kept = {name for name in self._held if name not in given_up}
        self._gone: dict[Name, str] = {}
        self._sent: dict[Name, int] = {}

    def check_instruction(self, position: int, instruction: Instruction) -> None:
        self._position, self._instruction = position, instruction
        match instruction:
            case Run():
                self._run(instruction, self._plan.executable(instruction.executable))
            case Send(values=values):
                for name in values:
                    self._read(name)
                    self._sent[name] = position
            case Recv(values=values):
                for name in values:
                    self._define(name)
            case HostCall(values=values):
                for name in values:
                    self._read(name)
            case Free(values=values):
                for name in values:
                    self._read(name)
                    self._remove(name, "freed")

    def end(self, results: Collection[OutputLeaf]) -> None:
        where = f"group {self._mpmd_idx}"
        for leaf in results:
            if leaf.name not in self._held:
                name = f"{leaf.path} ({leaf.name})"
                self.faults.append(f"{where} lacks the result {name}, which {self._why_absent(leaf.name)}")
        needed = self._kept | {leaf.name for leaf in results}
        for name in (name for name in self._held if name not in needed):
            self.faults.append(f"{where} holds {name} to the end, where nothing needs it")

    def _run(self, run: Run, executable: Executable) -> None:
        for name, aval in zip(run.inputs, executable.inputs, strict=True):
            known = self._read(name)
            if known is not None and known != aval:
                self._fault(f"reads {name} as {aval}, but it is {known}")
        for i in executable.donated:
            name = run.inputs[i]
            if run.inputs.count(name) > 1:
                self._fault(f"donates {name} and reads it as another input too")
            if name in self._sent:
                sent = f"instruction {self._sent[name]} sends and the message may still need"
                self._fault(f"donates {name}, which {sent}")
            self._remove(name, "donated")
        for name in run.outputs:
            self._define(name)

    def _read(self, name: Name) -> Aval | None:
        held = self._held.get(name)
        if held is None:
            self._fault(f"uses {name}, which {self._why_absent(name)}")
        return held

    def _define(self, name: Name) -> None:
        if name in self._held or name in self._gone:
            self._fault(f"defines {name} again")
        elif name in self._avals:
            self._held[name] = self._avals[name]

    def _remove(self, name: Name, how: str) -> None:
        if name in self._kept:
            self._fault(f"{name} is {how}, but the caller keeps it")
        if name in self._held:
            del self._held[name]
            self._gone[name] = f"was {how} in instruction {self._position}"

    def _why_absent(self, name: Name) -> str:
        return self._gone.get(name, "is not defined before")

    def _fault(self, what: str) -> None:
        here = self._instruction
        text = here.label if isinstance(here, Run) else str(here)[:60]
        self.faults.append(f"group {self._mpmd_idx}, instruction {self._position} ({text}) {what}")

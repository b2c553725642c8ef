"""A profile: the recorded times of one or several steps, with the plan that they followed."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from mpmd.attribution.accounts import Account
from mpmd.attribution.analysis import Analysis
from mpmd.attribution.attribution import Attribution
from mpmd.attribution.clocks import MatchedStep
from mpmd.attribution.findings import PLAN_CALL, Finding
from mpmd.attribution.gaps import IdleSpan
from mpmd.attribution.memory import MemoryOverTime, memory_over_time
from mpmd.attribution.path import Segment
from mpmd.attribution.scenarios import Scenario
from mpmd.ir.events import Event
from mpmd.ir.plan import Plan
from mpmd.ir.process_times import RecordedStep
from mpmd.ir.routes import Topology
from mpmd.ir.tasks import AnyTask, OutsideTask, Task, parse_task
from mpmd.profile.faults import fault_of
from mpmd.profile.text import profile_text
from mpmd.render.page import Subject, page
from mpmd.util.guarded_files import parse_json, read_bytes
from mpmd.util.json_data import JsonFormat
from mpmd.util.notebook import ShownAsText
from mpmd.validation import path_fault, raise_faults, shown, str_fault, type_fault

FORMAT = "mpmd profile"

VERSION = 2
"""The version of the format, which changes when files of before cannot be read any more."""

_JSON = JsonFormat({AnyTask: parse_task, Task | OutsideTask: parse_task})


@dataclasses.dataclass(frozen=True, repr=False)
class Profile(ShownAsText):
    """The recorded times of steps. Unpacks into the last step's result and its events.

    ``print(profile)`` shows where the time of each group went, and the first findings.

    Attributes:
      plan: the programs that the groups ran.
      topology: the processes of the groups.
      recorded: each recorded step, as the driver and all processes recorded it.
      sources: for each executable, the user's functions that it runs with their lines, as text; the function
        with the most operations first.
      compile_seconds: how long each pass of the compiler took, as in ``step.report()``.
      updated: the names of the arguments that the step returns updated.
      result: the last step's result; ``None`` in a profile that was loaded from a file.
    """

    plan: Plan
    topology: Topology
    recorded: tuple[RecordedStep, ...]
    sources: Mapping[str, tuple[str, ...]]
    compile_seconds: Mapping[str, float]
    updated: frozenset[str]
    result: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __iter__(self) -> Iterator[Any]:
        yield self.result
        yield self.events

    def __str__(self) -> str:
        return profile_text(self.attribution, self.findings, len(self.recorded), self.recoveries)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the profile without its result to a file, which ``Profile.load`` reads.

        Raises ``OSError`` when the file cannot be written.
        """
        raise_faults(path_fault("path", path))
        target = pathlib.Path(path)
        if target.is_dir():
            raise IsADirectoryError(
                f"{target} is a directory; name a file in it, such as {target / 'step.json'}"
            )
        if not target.parent.is_dir():
            raise FileNotFoundError(f"{target} cannot be written: there is no directory {target.parent}")
        content = {"format": FORMAT, "version": VERSION, "profile": _JSON.dump(Profile, self)}
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:  # readers find a whole file or none
            partial.write_text(json.dumps(content, separators=(",", ":")))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Reads a profile of ``save``; its ``result`` is ``None``.

        Raises: ``OSError`` when the file cannot be read, ``ValueError`` when it is no profile, or one of
          another version; ``TypeError`` when ``path`` is no path.
        """
        raise_faults(path_fault("path", path))
        if pathlib.Path(path).is_dir():
            raise IsADirectoryError(f"{path} is a directory, and no profile, which is a file")
        try:
            content = parse_json(read_bytes(path))
        except ValueError as error:
            raise ValueError(f"{path} is not a profile: it is not JSON ({error})") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is not a profile, which step.profile(...).save(path) writes")
        if content.get("version") != VERSION:
            raise ValueError(
                f"{path} is a profile of version {shown(content.get('version'))}, and this release reads "
                f"version {VERSION}; read it with the release that wrote it, or profile again"
            )
        try:
            profile: Profile = _JSON.load(Profile, content.get("profile"))
        except ValueError as error:
            raise ValueError(f"{path} is a damaged profile: {error}") from None
        if fault := fault_of(profile.plan, profile.topology, profile.recorded):
            raise ValueError(f"{path} is a damaged profile: {fault}")
        return profile

    def write_html(
        self, path: str | os.PathLike[str], title: str | None = None, before: Profile | None = None
    ) -> None:
        """Writes a page for a browser: where the time of the step went, and why groups waited.

        It shows the recorded step of median length. It is one file, which loads nothing from elsewhere.

        Args:
          title: the heading; ``None``: the schedule and its size.
          before: an earlier profile; the page begins with the changes since, by cause and by type of task.

        Raises ``OSError`` when the file cannot be written; ``TypeError`` for arguments of other types.
        """
        raise_faults(
            path_fault("path", path),
            str_fault("title", title, optional=True),
            type_fault("before", before, Profile, "a Profile", optional=True),
        )
        title = self._title if title is None else title
        if before is None:
            text = page(self._subject("Measured"), title)
        else:
            text = page(self._subject("After"), title, before._subject("Before"))
        pathlib.Path(path).write_text(text, encoding="utf-8")

    @property
    def _title(self) -> str:
        loops = [f"{loop.schedule}, {loop.num_microbatches} microbatches" for loop in self.plan.loops]
        return ", ".join([*loops, f"{len(self.plan.programs)} groups"])

    def _subject(self, name: str) -> Subject:
        return Subject(name, self._analysis, self.sources, self.compile_seconds, self.memory)

    def without_result(self) -> Profile:
        """The profile without the last step's result; both profiles share the analysis."""
        profile = dataclasses.replace(self, result=None)
        profile.__dict__["_analysis"] = self._analysis
        return profile

    @functools.cached_property
    def _analysis(self) -> Analysis:
        return Analysis(self.plan, self.topology, self.recorded)

    @property
    def steps(self) -> tuple[MatchedStep, ...]:
        """The recorded steps by the driver's clock, each in nanoseconds since its call."""
        return self._analysis.steps

    @property
    def recoveries(self) -> Mapping[int, int]:
        """By the number of a step, the nanoseconds from its call until its groups had been replaced.

        Such a step counts in no median and is not explained, unless all steps are such.
        """
        return self._analysis.recoveries

    @functools.cached_property
    def memory(self) -> tuple[MemoryOverTime, ...]:
        """For each group, the bytes of each device over the step of median length, by their purpose."""
        return memory_over_time(self.plan, self._analysis.step, self.updated)

    @property
    def attribution(self) -> Attribution:
        """The causes of the idle time of the recorded step of median length; medians are over all steps."""
        return self._analysis.attribution

    @property
    def gaps(self) -> tuple[IdleSpan, ...]:
        """The spans in which groups ran no task, with their causes in nanoseconds, by group and start."""
        return self.attribution.gaps

    @property
    def accounts(self) -> tuple[Account, ...]:
        """The parts of the time at which each operation ended, in nanoseconds, by operation."""
        return self.attribution.accounts

    @property
    def critical_path(self) -> tuple[Segment, ...]:
        """The tasks, messages and other spans that the step's end came after, from the call to the return."""
        return self.attribution.critical_path

    @property
    def scenarios(self) -> tuple[Scenario, ...]:
        """The length of the step if single things were otherwise, by simulation."""
        return self._analysis.scenarios

    @property
    def alternatives(self) -> NoReturn:
        """Removed: ``mpmd.plan`` compares schedules and numbers of microbatches."""
        raise AttributeError(f"a profile has no alternatives: {PLAN_CALL} compares other schedules")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Sentences on where the time went, the largest saving first."""
        return self._analysis.findings

    @functools.cached_property
    def events(self) -> tuple[Event, ...]:
        """The tasks and waits of the first process of each group in the last step, by group and start.

        In seconds since the driver's call.
        """
        first = (times for times in self.steps[-1].processes if times.rank == 0)
        return tuple(event for times in first for event in times.events())

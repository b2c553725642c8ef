// The sections of one profile: its figures, findings and tables.

function figures(profile) {
  return element("dl", { className: "figures" }, profile.facts.map(({ label, value, unit }) => element("div", {},
    element("dt", {}, label), element("dd", {}, TEXT_OF[unit](value)))));
}

const FIRST_FINDINGS = 5;

function findingsSection(profile) {
  const items = profile.findings.map(({ text, saves, task }) => element("li", {},
    element("span", {}, `${text} `, task < 0 ? null : button("Show", () => selectTask(profile, task, { scroll: true }))),
    element("span", { className: "saves" }, `saves ${percent(saves)}`)));
  if (!items.length) return [figures(profile), element("p", {}, "Nothing that one change would mend costs this step any time to speak of.")];
  const list = (some, start) => element("ol", { className: "findings", start, style: { counterReset: `finding ${start - 1}` } }, some);
  const parts = [figures(profile), list(items.slice(0, FIRST_FINDINGS), 1)];
  if (items.length > FIRST_FINDINGS) {
    const rest = `${items.length - FIRST_FINDINGS} more that save less`;
    parts.push(element("details", {}, element("summary", {}, rest), list(items.slice(FIRST_FINDINGS), FIRST_FINDINGS + 1)));
  }
  return parts;
}

function idleSection(profile) {
  const { causes, lanes, groups } = profile;
  const most = Math.max(...groups.map((group) => group.idle_total), 1);
  const parts = (totals) => causes.map((cause, number) => ({ ...cause, amount: totals[number] }));
  const shown = causes.map((cause, number) => ({ ...cause, number })).filter((cause) => cause.total > 0);
  const columns = [
    { title: "Group", cell: (group) => String(groups.indexOf(group)) },
    { title: "Idle", cell: (group) => duration(group.idle_total), key: (group) => group.idle_total },
    { title: "Of the step", cell: (group) => percent(group.idle_total / profile.makespan) },
    { title: "By cause", className: "text", cell: (group) => stack(parts(group.cause_totals), most, duration) },
    ...shown.map(({ label, number }) => ({
      title: label, cell: (group) => (group.cause_totals[number] ? duration(group.cause_totals[number]) : ""), key: (group) => group.cause_totals[number],
    })),
  ];
  const foot = ["All", duration(profile.idle), percent(profile.idle / profile.makespan / lanes.length), "",
    ...shown.map(({ total }) => [duration(total), element("br"), percent(total / Math.max(profile.idle, 1))])];
  const meanings = element("details", { className: "note" }, element("summary", {}, "What the causes mean"),
    element("ul", {}, shown.map(({ label, meaning }) => element("li", {}, element("b", {}, label), `: ${meaning}`))));
  return [
    table("Idle time of each group by its cause; the causes add up to it exactly", columns, groups, { foot, tall: groups.length > 16 }),
    meanings,
    waitsTable(profile),
  ];
}

function waitsTable(profile) {
  if (!profile.waits.length) return null;
  const columns = [
    { title: "Group", cell: (wait) => String(wait.group) },
    { title: "Before", className: "text", cell: (wait) => (wait.k < profile.lanes[wait.group].size ? profile.taskName({ lane: profile.lanes[wait.group], k: wait.k }) : "the end of the step") },
    { title: "Idle", cell: (wait) => duration(wait.length) },
    { title: "Beyond fill", cell: (wait) => duration(wait.beyond_fill) },
    { title: "Most of that", className: "text", cell: (wait) => [swatch(profile.causes[wait.cause]), profile.causes[wait.cause].label] },
    { title: "Waited for", className: "text", cell: (wait) => (wait.waited < 0 ? "" : nameWithGroup(profile, wait.waited)) },
    { title: "", className: "screen", cell: (wait) => button("Show", () => selectGap(profile, wait.group, wait.k, { scroll: true })) },
  ];
  return [element("h3", {}, "Longest gaps"), table("The gaps with the most idle time beyond the fill of the schedule", columns, profile.waits)];
}

function pathSection(profile) {
  const { kinds, types } = profile.path;
  const parts = kinds.map((kind) => ({ ...kind, amount: kind.total }));
  const columns = [
    { title: "Task", className: "text", cell: ({ type }) => [swatch(profile.types[type]), profile.types[type].label] },
    { title: "Group", cell: ({ type }) => String(profile.types[type].group) },
    { title: "Times", cell: (row) => count(row.count) },
    { title: "Sum", cell: (row) => duration(row.total) },
    { title: "Of the step", cell: (row) => percent(row.total / profile.makespan) },
    { title: "", className: "meters", cell: (row) => meter(row.total / profile.makespan) },
  ];
  return [
    element("p", { className: "note" }, "What the end of the step came after, back to its beginning, without a hole."),
    stack(parts, profile.makespan, duration, "stack large"),
    element("ul", { className: "legend", aria: { label: "Parts of the critical path" } }, kinds.filter((kind) => kind.total > 0).map((kind) => element("li", {},
      swatch(kind), `${kind.label}: ${duration(kind.total)}, ${percent(kind.total / profile.makespan)}`))),
    table("Tasks on the critical path", columns, types),
  ];
}

function scenariosSection(profile) {
  const { scenarios } = profile;
  if (!scenarios.length) return null;
  const most = Math.max(...scenarios.map((scenario) => scenario.makespan), 1);
  const columns = [
    { title: "If", className: "text", cell: (scenario) => scenario.name },
    { title: "The step takes", cell: (scenario) => duration(scenario.makespan) },
    { title: "", className: "meters", cell: (scenario) => meter(scenario.makespan / most) },
    { title: "Saves", cell: (scenario) => (scenario.saves ? percent(scenario.saves) : "") },
    { title: "What it is", className: "wide", cell: (scenario) => scenario.meaning },
  ];
  const parts = [table("Steps that the simulator gives, with one thing changed", columns, scenarios, { tall: scenarios.length > 24 })];
  return parts;
}

const sourceLines = (sources) => sources.slice(0, 3).flatMap((source, number) => [number ? ", " : "", element("code", {}, source)])
  .concat(sources.length > 3 ? [` and ${sources.length - 3} more`] : []);

function tasksSection(profile) {
  const busy = Math.max(profile.types.reduce((sum, type) => sum + type.total, 0), 1);
  const columns = [
    { title: "Task", className: "text", cell: (type) => [swatch(type), type.label], key: (type) => type.label },
    { title: "Group", cell: (type) => String(type.group), key: (type) => type.group },
    { title: "Count", cell: (type) => count(type.count), key: (type) => type.count },
    { title: "Median", cell: (type) => duration(type.median), key: (type) => type.median },
    { title: "95th percentile", cell: (type) => duration(type.p95), key: (type) => type.p95 },
    { title: "Longest", cell: (type) => duration(type.longest), key: (type) => type.longest },
    { title: "Sum", cell: (type) => duration(type.total), key: (type) => type.total },
    { title: "Share", cell: (type) => percent(type.total / busy), key: (type) => type.total },
    { title: "Runs", className: "wide", cell: (type) => sourceLines(type.sources) },
  ];
  return [table("Tasks by their type, the largest sum first; medians are over all recorded steps, the rest over the one shown", columns, profile.types, { sorted: 6, tall: profile.types.length > 24 })];
}

function messagesSection(profile) {
  const { edges, lanes } = profile;
  if (!edges.length) return [element("p", { className: "note" }, "The groups send no messages.")];
  const most = Math.max(...edges.map((edge) => edge.bytes), 1);
  const name = (edge) => `${edge.src} to ${edge.dst}`;
  const columns = [
    { title: "Groups", className: "text", cell: name },
    { title: "Bytes", cell: (edge) => bytes(edge.bytes), key: (edge) => edge.bytes },
    { title: "", className: "meters", cell: (edge) => meter(edge.bytes / most) },
    { title: "Messages", cell: (edge) => count(edge.count), key: (edge) => edge.count },
    { title: "In flight, median", cell: (edge) => (edge.flight === null ? "" : duration(edge.flight)), key: (edge) => edge.flight ?? -1 },
  ];
  const parts = [table("Messages between groups in one step", columns, edges, { tall: edges.length > 16 })];
  if (lanes.length > 12 || lanes.length < 3) return parts;
  const cells = new Map(edges.map((edge) => [name(edge), edge]));
  const matrix = [
    { title: "From, to", cell: ({ group }) => String(group) },
    ...lanes.map((to) => ({ title: String(to.group), cell: (from) => {
      const edge = cells.get(`${from.group} to ${to.group}`);
      return edge ? element("span", { className: "filled" }, bytes(edge.bytes)) : "·";
    } })),
  ];
  return [...parts, element("h3", {}, "As a matrix"), table("Bytes from the group of the row to that of the column", matrix, lanes)];
}

function stagesSection(profile) {
  if (!profile.stages.length) return null;
  const most = Math.max(...profile.stages.map((stage) => stage.time), 1);
  const columns = [
    { title: "Stage", className: "text", cell: (stage) => stage.label },
    { title: "Group", cell: (stage) => stage.groups.join(", ") },
    { title: "Time of a microbatch", cell: (stage) => duration(stage.time), key: (stage) => stage.time },
    { title: "", className: "meters", cell: (stage) => meter(stage.time / most) },
    ...(profile.stages.some((stage) => stage.layers.length)
      ? [{ title: "Layers", className: "text", cell: (stage) => stage.layers.join(", ") }] : []),
    { title: "Tasks", className: "text", cell: (stage) => stage.tasks.join(", ") },
    { title: "Runs", className: "wide", cell: (stage) => sourceLines(stage.sources) },
  ];
  return [table("Stages, with the functions that do most of their work", columns, profile.stages, { tall: profile.stages.length > 24 })];
}

function processesSection(profile) {
  const { processes } = profile;
  const columns = [
    { title: "Group", cell: (process) => String(process.group), key: (process) => process.group },
    { title: "Process", cell: (process) => String(process.rank) },
    { title: "Node", className: "text", cell: (process) => process.node, key: (process) => process.node },
    { title: "Cores", cell: (process) => (process.cores ? count(process.cores) : ""), key: (process) => process.cores },
    { title: "Request", cell: (process) => duration(process.received), key: (process) => process.received },
    { title: "Ready", cell: (process) => duration(process.ready), key: (process) => process.ready },
    { title: "Finished", cell: (process) => duration(process.finished), key: (process) => process.finished },
    { title: "Replied", cell: (process) => duration(process.replied), key: (process) => process.replied },
    { title: "Error of its clock", cell: (process) => duration(process.error), key: (process) => process.error },
  ];
  return [table("Processes: when each had the request, had the arguments, had run its last task, and had replied", columns, processes, { tall: processes.length > 16 })];
}

function compileSection(profile) {
  const whole = profile.compile.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!whole) return null;
  const text = (seconds) => `${seconds.toFixed(2)} s`;
  const columns = [
    { title: "Phase", className: "text", cell: ([name]) => name },
    { title: "Time", cell: ([, seconds]) => text(seconds) },
    { title: "", className: "meters", cell: ([, seconds]) => meter(seconds / whole) },
  ];
  return [table("Phases of compiling", columns, profile.compile, { foot: ["All", text(whole), ""] })];
}

const SECTIONS = [
  ["findings", "Findings", findingsSection],
  ["idle", "Idle time", idleSection],
  ["path", "Critical path", pathSection],
  ["scenarios", "What if", scenariosSection],
  ["memory", "Memory", memorySection],
  ["tasks", "Tasks", tasksSection],
  ["messages", "Messages", messagesSection],
  ["stages", "Stages", stagesSection],
  ["processes", "Processes", processesSection],
  ["compile", "Compiling", compileSection],
];

/** Builds the sections of a profile; returns the ids and titles of those that it has. */
function buildSections(profile) {
  state.chart = null;
  const built = [];
  for (const [id, title, content] of SECTIONS) {
    const parts = content(profile);
    if (!parts) continue;
    const section = element("section", { id, aria: { labelledby: `${id}-title` } },
      element("h2", { id: `${id}-title` }, title), parts.flat());
    built.push([id, title, section]);
  }
  return built;
}

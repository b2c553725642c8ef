// Begins the page.

function buildPanels() {
  const [first, second] = state.profiles;
  if (second) state.panels = [new Panel(first, null, 0), new Panel(second, null, 1)];
  else state.panels = [new Panel(first, null, 0), ...(first.simulations.length ? [new Panel(first, 0, 1)] : [])];
  for (const panel of state.panels) {
    byId("panels").append(panel.title, panel.canvas);
    listen(panel);
  }
  const below = byId("below");
  const simulated = state.panels.find((panel) => !panel.measured);
  byId("below-label").hidden = !simulated || first.simulations.length < 2;
  below.append(...first.simulations.map((simulation, number) => element("option", { value: number }, simulation.label)));
  below.addEventListener("change", () => {
    if (state.selected && state.selected.panel === simulated) select(null);
    simulated.simulation = Number(below.value);
    simulated.rename();
    redraw();
  });
  byId("timeline-legend").append(...legendItems(first.causes.filter((cause) => state.profiles.some(
    (profile) => profile.causes.some((other) => other.key === cause.key && other.total > 0)))));
  state.whole = Math.max(...state.profiles.map((profile) => profile.makespan), ...first.simulations.map((simulation) => (second ? 0 : simulation.makespan)));
  state.to = state.whole;
}

function showProfile(number) {
  state.current = number;
  const built = buildSections(state.profiles[number]);
  const sections = built.map(([, , section]) => section);
  byId("sections").replaceChildren(...sections);
  const links = built.map(([id, title]) => [id, title]);
  if (state.profiles.length === 1) {
    byId("timeline").before(sections[0]);
    links.splice(1, 0, ["timeline", "Timeline"]);
  } else links.unshift(["changed", "Changes"], ["timeline", "Timeline"]);
  byId("contents").replaceChildren(...links.map(([id, title]) => element("a", { href: `#${id}` }, title)));
  redraw();
}

function buildChoice() {
  const choice = byId("which");
  choice.hidden = false;
  choice.append(...state.profiles.map((profile, number) => element("label", {}, element("input", {
    type: "radio", name: "profile", value: number, checked: number === state.current, onchange: () => showProfile(number),
  }), ` ${profile.name}`)));
}

function begin() {
  const data = JSON.parse(byId("data").textContent);
  state.profiles = data.profiles.map((profile) => new Profile(profile));
  buildPanels();
  if (data.comparison) {
    buildComparison(data.comparison);
    state.current = 1;
    buildChoice();
  }
  listenToTheme();
  showProfile(state.current);
  showSelected();
  listenToSearch();
  listenToOverview();
  byId("zoom-in").addEventListener("click", () => zoom(0.5));
  byId("zoom-out").addEventListener("click", () => zoom(2));
  byId("zoom-all").addEventListener("click", () => show(0, state.whole));
  byId("show-path").addEventListener("change", redraw);
  drawers.push(drawOverview, () => state.panels.forEach((panel) => panel.draw()), () => state.chart && state.chart.draw());
  new ResizeObserver(redraw).observe(byId("panels"));
  drawers.forEach((draw) => draw());
  document.body.dataset.ready = "true";
}

begin();

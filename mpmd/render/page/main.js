// Begins the page.

function buildPanels() {
  const { simulations } = profile;
  state.panels = [new Panel(null), ...(simulations.length ? [new Panel(0)] : [])];
  for (const panel of state.panels) {
    byId("panels").append(panel.title, panel.canvas);
    listen(panel);
  }
  const [, simulated] = state.panels;
  const below = byId("below");
  below.append(...simulations.map(({ label }, value) => element("option", { value }, label)));
  below.addEventListener("change", () => {
    if (state.selected && state.selected.panel === simulated) select(null);
    simulated.simulation = Number(below.value);
    simulated.rename();
    redraw();
  });
  state.whole = state.to = Math.max(profile.makespan, ...simulations.map(({ makespan }) => makespan));
}

function buildSections() {
  const first = [...(profile.changes ? [sectionOf(profile.changes)] : []), findingsSection()];
  const rest = profile.sections.map((section) =>
    (section.id === "memory" ? sectionOf(section, memoryChart()) : sectionOf(section)));
  byId("timeline").before(...first);
  byId("sections").append(...rest);
  byId("contents").append(...[...first, byId("timeline"), ...rest].map((section) =>
    element("a", { href: `#${section.id}` }, section.querySelector("h2").textContent)));
}

function begin() {
  profile = new Profile(JSON.parse(byId("data").textContent));
  buildPanels();
  buildSections();
  listenToTheme();
  showSelected();
  listenToSearch();
  listenToOverview();
  byId("zoom-in").addEventListener("click", () => zoom(0.5));
  byId("zoom-out").addEventListener("click", () => zoom(2));
  byId("zoom-all").addEventListener("click", () => show(0, state.whole));
  byId("show-path").addEventListener("change", redraw);
  drawers.push(drawOverview, () => state.panels.forEach((panel) => panel.draw()));
  if (state.chart) drawers.push(() => state.chart.draw());
  new ResizeObserver(redraw).observe(byId("panels"));
  draw();
  document.body.dataset.ready = "true";
}

begin();

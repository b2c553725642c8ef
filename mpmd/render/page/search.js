// The search for tasks by name: `fwd_1` finds all microbatches, `fwd_1__3` one task, `bwd` all backwards.

const search = { text: "", hits: [], at: -1 };

function matcher(profile, text) {
  const byType = profile.types.map((type) => type.label.toLowerCase().includes(text));
  const [label, microbatch] = text.split("__");
  const mayName = profile.types.map((type) => type.label.toLowerCase().includes(label));
  return (lane, k) => {
    if (lane.names[k]) return lane.names[k].toLowerCase().includes(text);
    if (microbatch === undefined) return byType[lane.type[k]];
    return mayName[lane.type[k]] && lane.microbatch[k] >= 0
      && profile.types[lane.type[k]].label.toLowerCase().endsWith(label)
      && (microbatch === "" || String(lane.microbatch[k]) === microbatch);
  };
}

function find(text) {
  search.text = text;
  search.hits = [];
  search.at = -1;
  state.found = text ? new Map() : null;
  for (const panel of text ? state.panels : []) {
    if (state.found.has(panel.profile)) continue;
    const found = new Uint8Array(panel.profile.size);
    const matches = matcher(panel.profile, text);
    for (const lane of panel.profile.lanes) {
      for (let k = 0; k < lane.size; k++) {
        if (!matches(lane, k)) continue;
        found[lane.first + k] = 1;
        search.hits.push({ panel, lane, k, gap: false, start: lane.measured.starts[k] });
      }
    }
    state.found.set(panel.profile, found);
  }
  search.hits.sort((a, b) => a.start - b.start);
  showHits();
  redraw();
}

function showHits() {
  const { text, hits, at } = search;
  byId("search-count").textContent = !text ? ""
    : !hits.length ? "no task" : at < 0 ? `${count(hits.length)} found` : `${count(at + 1)} of ${count(hits.length)}`;
}

function nextHit(way) {
  if (!search.hits.length) return;
  search.at = search.at < 0 && way < 0 ? search.hits.length - 1 : (search.at + way + search.hits.length) % search.hits.length;
  select(search.hits[search.at], { near: true });
  showHits();
}

function listenToSearch() {
  const input = byId("search");
  const labels = new Set(state.profiles.flatMap((profile) => profile.types.map((type) => type.label)));
  byId("search-labels").replaceChildren(...[...labels].slice(0, 300).map((value) => element("option", { value })));
  input.addEventListener("input", () => find(input.value.trim().toLowerCase()));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") nextHit(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") {
      input.value = "";
      find("");
    }
  });
  byId("search-next").addEventListener("click", () => nextHit(1));
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest && event.target.closest("input, select, textarea");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    input.focus();
    input.select();
  });
}

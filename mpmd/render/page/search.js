// The search for tasks by name: `fwd_1` finds all microbatches, `fwd_1__3` one task, `bwd` all backwards.

const search = { text: "", hits: [], at: -1 };

/** Whether the task at a place of a lane has a name with a text, which may end with a microbatch. */
function matcher(text) {
  const [name, microbatch] = text.split("__");
  const ofType = profile.types.map(({ label }) => (microbatch === undefined
    ? label.toLowerCase().includes(text) : label.toLowerCase().endsWith(name)));
  return (lane, k) => {
    if (lane.names[k]) return lane.names[k].toLowerCase().includes(text);
    if (!microbatch) return ofType[lane.type[k]];
    return ofType[lane.type[k]] && String(lane.microbatch[k]) === microbatch;
  };
}

function find(text) {
  Object.assign(search, { text, hits: [], at: -1 });
  state.found = text ? new Uint8Array(profile.size) : null;
  const matches = matcher(text);
  for (const lane of text ? profile.lanes : []) {
    for (let k = 0; k < lane.size; k++) {
      if (!matches(lane, k)) continue;
      state.found[lane.first + k] = 1;
      search.hits.push({ number: lane.first + k, start: lane.measured.starts[k] });
    }
  }
  search.hits.sort((a, b) => a.start - b.start);
  showHits();
  redraw();
}

function showHits() {
  const { text, hits, at } = search;
  byId("search-count").textContent = !text ? "" : !hits.length ? "no task"
    : at < 0 ? `${count(hits.length)} found` : `${count(at + 1)} of ${count(hits.length)}`;
}

function nextHit(way) {
  const { hits, at } = search;
  if (!hits.length) return;
  search.at = at < 0 && way < 0 ? hits.length - 1 : (at + way + hits.length) % hits.length;
  selectTask(hits[search.at].number, { near: true });
  showHits();
}

function listenToSearch() {
  const input = byId("search");
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
    const typing = event.target.closest && event.target.closest("input, select");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    input.focus();
    input.select();
  });
}

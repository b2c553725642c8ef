// Mouse, touch and keys on the lanes.

function listen(panel) {
  const { canvas } = panel;
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    drag = { x: event.offsetX, from: state.from, to: state.to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) {
      showTip(panel.at(event.offsetX, event.offsetY), event);
      return;
    }
    if (Math.abs(event.offsetX - drag.x) > 3) drag.moved = true;
    if (!drag.moved) return;
    showTip(null);
    const way = ((drag.x - event.offsetX) / (canvas.clientWidth - LEFT)) * (drag.to - drag.from);
    show(drag.from + way, drag.to + way);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) select(panel.at(event.offsetX, event.offsetY));
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => {
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => showTip(null));
  canvas.addEventListener("dblclick", (event) => zoom(0.25, timeAt(canvas, event.offsetX)));
  canvas.addEventListener("wheel", (event) => turn(panel, event), { passive: false });
  canvas.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && press(panel, event)) event.preventDefault();
  });
}

/** The wheel zooms with Ctrl or once the lanes have the focus, and pans sideways; else the page scrolls. */
function turn(panel, event) {
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / panel.canvas.clientWidth);
  else if (event.ctrlKey || event.metaKey || document.activeElement === panel.canvas) {
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.0025))), timeAt(panel.canvas, event.offsetX));
  } else return;
  event.preventDefault();
  showTip(null);
}

/** Whether the key is one of the lanes. */
function press(panel, event) {
  const selected = state.selected && state.selected.panel === panel ? state.selected : null;
  const move = (next) => select(selected ? next(selected) : firstInSight(panel));
  const actions = {
    ArrowRight: () => (event.shiftKey ? pan(0.2) : move((place) => neighbour(place, true))),
    ArrowLeft: () => (event.shiftKey ? pan(-0.2) : move((place) => neighbour(place, false))),
    ArrowDown: () => move((place) => beside(place, 1)),
    ArrowUp: () => move((place) => beside(place, -1)),
    Enter: () => {
      const source = selected ? sourceOf(selected) : -1;
      if (source >= 0) selectTask(source);
    },
    "+": () => zoom(0.5, middleOf(selected)),
    "=": () => zoom(0.5, middleOf(selected)),
    "-": () => zoom(2, middleOf(selected)),
    f: () => {
      if (selected) surround(panel.span(selected), 2);
    },
    0: () => show(0, state.whole),
    Escape: () => select(null),
  };
  const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (action) action();
  return Boolean(action);
}

function middleOf(place) {
  if (!place) return undefined;
  const [start, end] = place.panel.span(place);
  return Math.min(Math.max((start + end) / 2, state.from), state.to);
}

function showTip(place, event) {
  const tip = byId("tip");
  tip.hidden = !place;
  if (!place) return;
  const causes = place.gap ? causesOf(place).map((cause) => `${cause.label}: ${duration(cause.amount)}`) : [];
  tip.textContent = [titleOf(place), whenOf(place), ...causes, ...describe(place)].join("\n");
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 16;
  const top = event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

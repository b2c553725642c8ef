// The overview above the lanes: how many groups are busy, and the span in sight.

const OVERVIEW = 28; // CSS pixels

function drawOverview() {
  const [context, width] = fitted(byId("overview"), OVERVIEW + 8);
  const bottom = 2 + OVERVIEW;
  const scale = (width - LEFT) / state.whole;
  const step = (profile.makespan * scale) / profile.busy.length;
  context.fillStyle = state.theme.lane;
  context.fillRect(LEFT, 2, width - LEFT, OVERVIEW);
  context.fillStyle = "#7d8fb3";
  profile.busy.forEach((share, i) => {
    context.fillRect(LEFT + i * step, bottom - OVERVIEW * share, step + 0.5, OVERVIEW * share);
  });
  drawLabel(context, "busy", 20);
  context.strokeStyle = state.theme.accent;
  context.lineWidth = 2;
  const left = Math.min(LEFT + state.from * scale + 1, width - 4);
  context.strokeRect(left, 2, Math.max((state.to - state.from) * scale - 2, 2), OVERVIEW);
  byId("span").textContent = `${duration(state.from)} to ${duration(state.to)}`;
}

function listenToOverview() {
  const canvas = byId("overview");
  const centre = (event) => {
    if (!(event.buttons & 1)) return;
    const time = ((event.offsetX - LEFT) / (canvas.clientWidth - LEFT)) * state.whole;
    const half = (state.to - state.from) / 2;
    show(time - half, time + half);
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    centre(event);
  });
  canvas.addEventListener("pointermove", centre);
}

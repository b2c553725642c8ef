// The overview above the lanes: how many groups are busy, and the span in sight.

function drawOverview() {
  const canvas = byId("overview");
  const [context, width] = fitted(canvas, 36);
  const { profile } = state.panels[0];
  const height = 28;
  const across = ((width - LEFT) * profile.makespan) / state.whole;
  context.fillStyle = state.theme.lane;
  context.fillRect(LEFT, 2, width - LEFT, height);
  context.fillStyle = "#7d8fb3";
  context.beginPath();
  context.moveTo(LEFT, 2 + height);
  profile.busy.forEach((share, i) => {
    const y = 2 + height * (1 - share);
    context.lineTo(LEFT + (i / profile.busy.length) * across, y);
    context.lineTo(LEFT + ((i + 1) / profile.busy.length) * across, y);
  });
  context.lineTo(LEFT + across, 2 + height);
  context.fill();
  context.fillStyle = state.theme.faint;
  context.font = FONT;
  context.textAlign = "right";
  context.fillText("busy", LEFT - 8, 20);
  const left = LEFT + (state.from / state.whole) * (width - LEFT);
  const right = LEFT + (state.to / state.whole) * (width - LEFT);
  context.strokeStyle = state.theme.accent;
  context.lineWidth = 2;
  context.strokeRect(Math.min(left + 1, width - 4), 2, Math.max(right - left - 2, 2), height);
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

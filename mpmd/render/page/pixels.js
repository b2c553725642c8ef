// Lanes as pixels. Of what shares a pixel, the part that covers most of it gives the colour; so a frame takes
// time that grows with the tasks in sight and the pixels, and thousands of tasks on an inch stay legible.

const rgbOf = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

/** A colour of CSS as the number that a pixel of `ImageData` holds. */
function pixelOf(colour) {
  const [red, green, blue] = rgbOf(colour);
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

function mixed(pixel, other, share) {
  let result = 255 << 24;
  for (const shift of [0, 8, 16]) {
    result |= Math.round(((pixel >> shift) & 255) * (1 - share) + ((other >> shift) & 255) * share) << shift;
  }
  return result >>> 0;
}

/** One row of pixels. */
class Row {
  constructor(width) {
    this.width = width;
    this.pixels = new Uint32Array(width);
    this.covered = new Float32Array(width);
  }

  clear(pixel) {
    this.pixels.fill(pixel);
    this.covered.fill(0);
  }

  copy(other) {
    this.pixels.set(other.pixels);
    this.covered.set(other.covered);
  }

  fill(from, to, pixel) {
    if (to <= 0 || from >= this.width) return;
    const first = from < 0 ? 0 : from | 0;
    const last = to >= this.width ? this.width - 1 : to | 0;
    for (let x = first; x <= last; x++) {
      const covered = (to < x + 1 ? to : x + 1) - (from > x ? from : x);
      if (covered > this.covered[x]) {
        this.covered[x] = covered;
        this.pixels[x] = pixel;
      }
    }
  }
}

/** The tasks of a lane whose times reach into a span: the first, and the one behind the last. */
function inSight(times, from, to) {
  return [Math.max(lastIndexBefore(times.starts, from), 0), lastIndexBefore(times.starts, to) + 1];
}

function fillTasks(row, lane, times, view, palette, dimmed) {
  const { starts, ends } = times;
  const [first, end] = inSight(times, view.from, view.to);
  for (let k = first; k < end; k++) {
    const left = (starts[k] - view.from) * view.scale;
    const right = (ends[k] - view.from) * view.scale;
    const colours = state.found && !state.found[lane.first + k] ? dimmed : palette;
    row.fill(left, right - left > 5 ? right - 1 : right, colours[lane.type[k]]);
  }
}

function fillGaps(row, lane, view, palette) {
  const { starts } = lane.measured;
  const [first, end] = inSight(lane.measured, view.from, view.to);
  for (let k = first; k <= Math.min(end, lane.size); k++) {
    const idle = lane.idle[k];
    if (!idle || lane.largest[k] < 0) continue;
    let left = ((k < lane.size ? starts[k] : profile.makespan) - idle - view.from) * view.scale;
    const width = idle * view.scale;
    if (width < 2) {
      row.fill(left, left + width, palette[lane.largest[k]]);
      continue;
    }
    for (let cause = 0; cause < palette.length; cause++) {
      const amount = lane.causes[cause] ? lane.causes[cause][k] : 0;
      if (amount > 0) row.fill(left, (left += amount * view.scale), palette[cause]);
    }
  }
}

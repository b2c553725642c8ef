// The profile, with its columns as typed arrays: ends and starts follow from idle and busy times, exactly.

let profile = null;

function lastIndexBefore(sorted, time) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low - 1;
}

/** The times of a group's tasks, measured or simulated, from the idle time before each. */
function laneTimes(idle, took) {
  const starts = new Float64Array(took.length);
  const ends = new Float64Array(took.length);
  let time = 0;
  for (let k = 0; k < took.length; k++) {
    starts[k] = time + idle[k];
    time = ends[k] = starts[k] + took[k];
  }
  return { starts, ends };
}

function readLane(data, group, first, simulations) {
  const causes = data.causes.map((column) => (column.length ? Float64Array.from(column) : null));
  const largest = new Int8Array(data.idle.length).fill(-1);
  causes.forEach((column, cause) => column && column.forEach((amount, k) => {
    if (amount > 0 && (largest[k] < 0 || amount > causes[largest[k]][k])) largest[k] = cause;
  }));
  return {
    ...data, group, first, causes, largest,
    size: data.took.length,
    culpritCause: data.culprit_cause,
    measured: laneTimes(data.idle, data.took),
    simulated: simulations.map(({ took }, number) =>
      laneTimes(data.simulated[number], data.type.map((type) => took[type]))),
  };
}

/** The data of the page with a lane for each group; tasks are numbered through all groups. */
class Profile {
  constructor(data) {
    Object.assign(this, data);
    this.causes = data.parts.slice(1);
    this.size = 0;
    this.lanes = data.groups.map((group, number) => {
      const lane = readLane(group, number, this.size, data.simulations);
      this.size += lane.size;
      return lane;
    });
    this.firsts = this.lanes.map((lane) => lane.first);
  }

  /** The place of a task by its number. */
  place(number) {
    const lane = this.lanes[lastIndexBefore(this.firsts, number)];
    return { lane, k: number - lane.first, gap: false };
  }

  taskName({ lane, k }) {
    if (lane.names[k]) return lane.names[k];
    const { label } = this.types[lane.type[k]];
    return lane.microbatch[k] < 0 ? label : `${label}__${lane.microbatch[k]}`;
  }

  /** The measured start and end of a task or a gap. */
  span({ lane, k, gap }) {
    const { starts, ends } = lane.measured;
    if (!gap) return [starts[k], ends[k]];
    const end = k < lane.size ? starts[k] : this.makespan;
    return [end - lane.idle[k], end];
  }
}

function nameWithGroup(number) {
  const place = profile.place(number);
  return `${profile.taskName(place)} of group ${place.lane.group}`;
}

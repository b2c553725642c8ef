// A profile's columns as typed arrays: ends and starts follow from idle and busy times, exactly.

function startsAfter(idle, took) {
  const starts = new Float64Array(took.length);
  let time = 0;
  for (let k = 0; k < took.length; k++) {
    starts[k] = time + idle[k];
    time = starts[k] + took[k];
  }
  return starts;
}

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

/** The times of a group's tasks, measured or simulated. */
function laneTimes(idle, took) {
  const starts = startsAfter(idle, took);
  return { starts, took, ends: starts.map((start, k) => start + took[k]) };
}

function readLane(profile, group, first) {
  const data = profile.groups[group];
  const took = Float64Array.from(data.took);
  const causes = data.causes.map((column) => (column.length ? Float64Array.from(column) : null));
  const largest = new Int8Array(data.idle.length).fill(-1);
  causes.forEach((column, cause) => column && column.forEach((amount, k) => {
    if (amount > 0 && (largest[k] < 0 || amount > causes[largest[k]][k])) largest[k] = cause;
  }));
  return {
    group, first, causes, largest, names: data.names,
    size: took.length,
    processor: data.processor,
    type: Uint16Array.from(data.type),
    microbatch: Int32Array.from(data.microbatch),
    idle: Float64Array.from(data.idle),
    waited: data.waited, culprit: data.culprit, culpritCause: data.culprit_cause, after: data.after,
    measured: laneTimes(data.idle, took),
    simulated: profile.simulations.map((simulation, number) => laneTimes(
      data.simulated[number], Float64Array.from(data.type, (type) => simulation.took[type]))),
  };
}

/** A profile with its lanes; tasks are numbered through all groups. */
class Profile {
  constructor(data) {
    Object.assign(this, data);
    this.size = 0;
    this.lanes = data.groups.map((_, group) => {
      const lane = readLane(data, group, this.size);
      this.size += lane.size;
      return lane;
    });
  }

  /** The place of a task by its number. */
  place(number) {
    const lane = this.lanes[lastIndexBefore(this.firsts, number)];
    return { lane, k: number - lane.first, gap: false };
  }

  get firsts() {
    this.cachedFirsts ??= Float64Array.from(this.lanes, (lane) => lane.first);
    return this.cachedFirsts;
  }

  typeOf({ lane, k }) {
    return this.types[lane.type[k]];
  }

  taskName({ lane, k }) {
    if (lane.names[k]) return lane.names[k];
    const label = this.types[lane.type[k]].label;
    return lane.microbatch[k] < 0 ? label : `${label}__${lane.microbatch[k]}`;
  }

  nameOf(number) {
    return this.taskName(this.place(number));
  }

  /** The measured start and end of a task or a gap. */
  span({ lane, k, gap }) {
    const { starts, ends } = lane.measured;
    if (!gap) return [starts[k], ends[k]];
    const end = k < lane.size ? starts[k] : this.makespan;
    return [end - lane.idle[k], end];
  }
}

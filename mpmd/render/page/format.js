// Numbers as text. Times are in nanoseconds, sizes in bytes, shares from 0 to 1.

const digits = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });

/** Three digits, also of whole numbers, so that the numbers of a column look alike. */
const threeDigits = (value) => (value === 0 ? "0"
  : value.toLocaleString("en", { maximumSignificantDigits: 3, minimumSignificantDigits: 3 }));

const count = (value) => value.toLocaleString("en");

function duration(nanoseconds) {
  const size = Math.abs(nanoseconds);
  if (size >= 1e9) return `${threeDigits(nanoseconds / 1e9)} s`;
  if (size >= 1e6) return `${threeDigits(nanoseconds / 1e6)} ms`;
  if (size >= 1e3) return `${threeDigits(nanoseconds / 1e3)} µs`;
  return size ? `${digits(nanoseconds)} ns` : "0";
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (Math.abs(value) >= 1024 && power < units.length - 1) {
    value /= 1024;
    power += 1;
  }
  return power ? `${threeDigits(value)} ${units[power]}` : `${digits(value)} B`;
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;

const TEXT_OF = { text: String, count, time: duration, bytes, share: percent };

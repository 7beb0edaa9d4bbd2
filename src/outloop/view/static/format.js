// Numbers and names as a person reads them.

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e7)) return value.toExponential(1);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return value.toLocaleString("en", { maximumFractionDigits: size >= 100 ? 0 : size >= 10 ? 1 : digits });
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let index = 0;
  while (value >= 1000 && index < units.length - 1) { value /= 1000; index += 1; }
  return `${number(value, 1)} ${units[index]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${number(value, 1)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${number(value / 3600, 1)} h`;
}

export function time(unix) {
  return unix ? new Date(unix * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }) : "–";
}

export function short(id) {
  return id && id.length > 14 ? `${id.slice(0, 12)}…` : id || "–";
}

// What no one could see, or what would turn the line around, is shown by its code.
export function visible(text) {
  return text.replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (one) => `‹U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);
}

// Text of many lines: as it is, but without what turns it around.
export function plain(text) {
  return text.replace(/[\u202a-\u202e\u2066-\u2069]/g, (one) => `‹U+${one.codePointAt(0).toString(16).toUpperCase()}›`);
}

export function fate(row) {
  return row.reason ? `${row.fate}: ${row.reason}` : row.fate;
}

// Addresses: everything that is shown has one, after the #.
//   #/RUN/overview?with=RUN   #/RUN/episodes?text=...   #/RUN/episode/ID   #/RUN/tokens/ID   #/RUN/group/ID
//   #/RUN/task/ID?before=VERSION

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [run = "", view = "", id = ""] = path.split("/").map(decodeURIComponent);
  return { run, view, id, query: new URLSearchParams(query) };
}

export function link(run, view = "overview", id = "", query = {}) {
  const words = [run, view, id].filter((word) => word !== "").map(encodeURIComponent);
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(given).toString();
  return `#/${words.join("/")}${text ? `?${text}` : ""}`;
}

// Changes the address without a new entry in the history.
export function rewrite(hash) {
  history.replaceState(null, "", hash);
}

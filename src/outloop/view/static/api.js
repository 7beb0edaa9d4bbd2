// What the server is asked.

async function get(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  if (answer.status === 401) throw new Error("The key is missing: open the link that `outloop view` has printed.");
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error || `The server answered ${answer.status}.`);
  return body;
}

const part = encodeURIComponent;

export const runs = () => get("/api/runs");
export const overview = (run) => get(`/api/runs/${part(run)}/overview`);
export const lanes = (run, last) => get(`/api/runs/${part(run)}/lanes${last ? `?last_s=${last}` : ""}`);
export const episodes = (run, query) => get(`/api/runs/${part(run)}/episodes?${new URLSearchParams(query)}`);
export const episode = (run, id) => get(`/api/runs/${part(run)}/episodes/${part(id)}`);
export const tokens = (run, id) => get(`/api/runs/${part(run)}/episodes/${part(id)}/tokens`);
export const task = (run, id, before) => get(`/api/runs/${part(run)}/task?${new URLSearchParams({ task_id: id, ...(before === null ? {} : { before }) })}`);
export const group = (run, id) => get(`/api/runs/${part(run)}/groups/${part(id)}`);

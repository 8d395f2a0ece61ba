// Server-sent events: everything once, then what is new. After a break the browser comes back by itself.

export function follow(query, { snapshot, change, missing }) {
  const mark = document.getElementById("connection");
  const say = (text, name) => {
    if (mark.textContent !== text) mark.textContent = text;
    mark.className = `connection ${name}`;
  };
  const source = new EventSource(`/api/live${query}`);
  say("connecting", "");
  source.addEventListener("open", () => say("live", "is-live"));
  source.addEventListener("snapshot", (event) => snapshot(JSON.parse(event.data)));
  source.addEventListener("change", (event) => change(JSON.parse(event.data)));
  source.addEventListener("error", async () => {
    if (source.readyState !== EventSource.CLOSED) { say("connection lost", "is-lost"); return; }
    say("not found", "is-lost");  // the server answered, and not with events
    missing();
  });
  return () => source.close();
}

export async function ask(path, parameters = {}) {
  const response = await fetch(`${path}?${new URLSearchParams(parameters)}`);
  const value = await response.json();
  if (!response.ok) throw new Error(value.error || `the server answered ${response.status}`);
  return value;
}

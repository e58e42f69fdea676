// Talking to the server: JSON, and streams of events.

export const $ = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export async function ask(what, value = "", ok = "OK") {
  $("ask-what").textContent = what;
  $("ask-value").value = value;
  $("ask-ok").textContent = ok;
  $("ask").returnValue = "no";
  $("ask").showModal();
  $("ask-value").select();
  await new Promise((done) => $("ask").addEventListener("close", done, { once: true }));
  return $("ask").returnValue === "yes" ? $("ask-value").value.trim() : null;
}

export async function call(method, path, body, options = {}) {
  const headers = {};
  const key = sessionStorage.getItem("key");
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined && !(body instanceof Blob)) {
    headers["Content-Type"] = "application/json";
    body = JSON.stringify(body);
  }
  const answer = await fetch(path, { method, headers, body, ...options });
  if (answer.status === 401) {
    const given = await ask("This server requires an API key.");
    if (given) {
      sessionStorage.setItem("key", given);
      return call(method, path, body, options);
    }
  }
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  return answer;
}

export const json = async (...given) => (await call(...given)).json();

// The events of a stream, one after the other.
export async function* events(...given) {
  const answer = await call(...given);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

export const count = (n) => n.toLocaleString("en");
export const size = (n) => (n >= 1e6 ? `${(n / 1e6).toFixed(1)} MB` : n >= 1e3 ? `${(n / 1e3).toFixed(1)} KB` : `${n} B`);

"use strict";

const KEYS = "123456789abcdefghijklmnopqrstuvwxyz";
const isMulti = document.body.dataset.multi === "true";
const element = (id) => document.getElementById(id);
let current = null;
let status = { classes: {} };
let chosen = new Set();
let busy = false;

async function request(path, body) {
  const options = body === undefined ? {} : {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
  const response = await fetch(path, options);
  const content = await response.json();
  if (!response.ok) throw Object.assign(new Error(content.error), { status: response.status });
  return content;
}

function make(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function report(error) {
  element("error").textContent = error ? error.message : "";
  element("error").hidden = !error;
}

async function act(work) {
  if (busy) return;
  busy = true;
  document.body.dataset.busy = "true";
  try {
    await work();
    report(null);
  } catch (error) {
    report(error.message === "Failed to fetch" ? new Error("The server has stopped.") : error);
  } finally {
    busy = false;
    delete document.body.dataset.busy;
  }
}

const words = (label) => (Array.isArray(label) ? label.join(", ") || "none" : label);
const percent = (fraction) => `${Math.round(100 * fraction)}%`;

function showText(container, row) {
  container.replaceChildren(make("p", row.text, { class: "text" }));
  if (row.text_pair !== undefined) container.append(make("p", row.text_pair, { class: "text" }));
  container.classList.toggle("pair", row.text_pair !== undefined);
}

async function showNext() {
  chosen = new Set();
  try {
    current = await request("/api/next");
    showText(element("text"), current);
  } catch (error) {
    if (error.status !== 404) throw error;
    current = null;
    element("text").replaceChildren(make("p", "All texts are labeled or skipped."));
  }
  showSuggestion();
  showClasses();
}

function showSuggestion() {
  const suggestion = current && current.suggestion;
  element("suggestion").hidden = !element("show-suggestion").checked || !suggestion;
  if (suggestion) {
    element("suggestion").textContent =
      `Suggestion: ${words(suggestion.label)} (${percent(suggestion.probability)})`;
  }
}

function showClasses() {
  const names = Object.keys(status.classes);
  element("classes").replaceChildren(...names.map((name, index) => {
    const button = make("button", name, { type: "button" });
    if (KEYS[index]) button.append(make("kbd", KEYS[index]));
    button.append(make("span", String(status.classes[name]), { class: "muted" }));
    if (isMulti) button.setAttribute("aria-pressed", String(chosen.has(name)));
    button.disabled = current === null;
    button.addEventListener("click", () => choose(name));
    return button;
  }));
  if (!names.length) element("classes").append(make("p", "Add the first class below.", { class: "muted" }));
  for (const id of ["old-name", "search-class"]) {
    const select = element(id);
    const before = select.value;
    const options = names.map((name) => make("option", name, { value: name }));
    if (id === "search-class") options.unshift(make("option", "all classes", { value: "" }));
    select.replaceChildren(...options);
    if (names.includes(before)) select.value = before;
  }
}

function showStatus(content) {
  status = content;
  const features = content.features < 1
    ? ` Features are computed for ${percent(content.features)} of the texts.` : "";
  const skipped = content.skipped ? `, ${content.skipped} skipped` : "";
  element("progress").textContent =
    `${content.labeled} of ${content.texts.toLocaleString("en")} texts labeled${skipped}.${features}`;
  if (content.error) report(new Error(`The model failed: ${content.error}. You can continue to label without it.`));
  element("undo").disabled = content.undoable === 0;
  element("file").textContent = content.file;
  element("command").textContent = content.command;
  showAgreement(content);
  showClasses();
}

function showAgreement(content) {
  const agreement = content.agreement;
  if (!agreement) return;
  element("agreement").textContent =
    `On ${agreement.texts} texts drawn at random, the model agreed with you ${agreement.agreed} times ` +
    `(95% CI ${percent(agreement.low)} to ${percent(agreement.high)}).`;
  const points = content.curve;
  if (points.length < 2) return;
  const [width, height, left] = [440, 170, 40];
  const last = points[points.length - 1].labels;
  const x = (point) => left + (width - left - 10) * (point.labels / last);
  const y = (fraction) => 10 + (height - 40) * (1 - fraction);
  const svg = (tag, attributes, text = "") => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = text;
    return made;
  };
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label":
    `Agreement on random texts: ${points.map((point) => `${percent(point.agreed / point.texts)} after ${point.labels} labels`).join(", ")}` });
  const line = (values, name) => picture.append(svg("path", {
    class: name, d: values.map(([a, b], index) => `${index ? "L" : "M"}${a},${b}`).join(""),
  }));
  for (const fraction of [0, 0.5, 1]) {
    line([[left, y(fraction)], [width - 10, y(fraction)]], "tick");
    picture.append(svg("text", { x: left - 6, y: y(fraction) + 4, "text-anchor": "end" }, percent(fraction)));
  }
  line([...points.map((point) => [x(point), y(point.low)]),
    ...[...points].reverse().map((point) => [x(point), y(point.high)])], "band");
  line(points.map((point) => [x(point), y(point.agreed / point.texts)]), "line");
  picture.append(svg("text", { x: width - 10, y: height - 6, "text-anchor": "end" }, `${last} labels`));
  element("curve").replaceChildren(picture);
}

function choose(name) {
  if (!current) return;
  if (!isMulti) {
    label(name);
  } else {
    if (!chosen.delete(name)) chosen.add(name);
    showClasses();
  }
}

const label = (value) => act(async () => {
  if (!current) return;
  showStatus(await request("/api/label", { row: current.row, label: value }));
  await showNext();
});

const undo = () => act(async () => {
  showStatus(await request("/api/undo", {}));
  await showNext();
});

async function showView(view) {
  for (const tab of document.querySelectorAll(".tab")) {
    tab.setAttribute("aria-pressed", String(tab.dataset.view === view));
    element(`view-${tab.dataset.view}`).hidden = tab.dataset.view !== view;
  }
  if (view === "doubts") await showDoubts();
  if (view === "texts") await showTexts();
}

function card(row, note) {
  const made = document.createElement("article");
  const texts = document.createElement("div");
  showText(texts, row);
  made.append(texts, make("p", note, { class: "muted" }));
  return made;
}

function picker(row, after) {
  const select = make("select", "", { "aria-label": `New label of row ${row.row}` });
  select.append(make("option", "change to …", { value: "" }));
  for (const name of Object.keys(status.classes)) select.append(make("option", name, { value: name }));
  select.addEventListener("change", () => act(async () => {
    const value = isMulti ? [select.value] : select.value;
    showStatus(await request("/api/label", { row: row.row, label: value }));
    await after();
  }));
  return select;
}

async function showDoubts() {
  const rows = await request("/api/contradictions");
  const cards = rows.map((row) => {
    const made = card(row, `Your label: ${words(row.label)}. Model: ${words(row.predicted)}.`);
    const actions = make("div", "", { class: "actions" });
    const keep = make("button", "Confirm", { type: "button" });
    keep.addEventListener("click", () => act(async () => {
      showStatus(await request("/api/label", { row: row.row, label: row.label }));
      made.remove();
    }));
    actions.append(keep, picker(row, async () => made.remove()));
    made.append(actions);
    return made;
  });
  element("doubts").replaceChildren(...(cards.length ? cards : [make("p", "The model agrees with all labels.")]));
}

async function showTexts() {
  const query = new URLSearchParams(new FormData(element("search")));
  const rows = await request(`/api/texts?${query}`);
  const cards = rows.map((row) => {
    const made = card(row, words(row.label));
    made.append(picker(row, showTexts));
    return made;
  });
  element("texts").replaceChildren(...(cards.length ? cards : [make("p", "No labeled text matches.")]));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea, summary") || element("view-label").hidden) return;
  const index = KEYS.indexOf(event.key.toLowerCase());
  const name = Object.keys(status.classes)[index];
  if (event.key === " ") label(null);
  else if (event.key === "Backspace") undo();
  else if (event.key === "Enter" && isMulti) label([...chosen]);
  else if (index >= 0 && name !== undefined) choose(name);
  else return;
  event.preventDefault();
});

element("skip").addEventListener("click", () => label(null));
element("undo").addEventListener("click", undo);
if (isMulti) element("done").addEventListener("click", () => label([...chosen]));
element("show-suggestion").addEventListener("change", showSuggestion);
element("add-class").addEventListener("submit", (event) => {
  event.preventDefault();
  act(async () => {
    showStatus(await request("/api/classes", { name: element("class-name").value }));
    event.target.reset();
    element("text").focus();
  });
});
element("rename-class").addEventListener("submit", (event) => {
  event.preventDefault();
  const names = { name: element("old-name").value, new_name: element("new-name").value };
  act(async () => {
    showStatus(await request("/api/classes", names));
    event.target.reset();
  });
});
element("search").addEventListener("input", () => act(showTexts));
element("search").addEventListener("submit", (event) => event.preventDefault());
for (const tab of document.querySelectorAll(".tab")) {
  tab.addEventListener("click", () => act(() => showView(tab.dataset.view)));
}

async function watchFeatures() {
  while (status.features < 1 && !status.error) {
    await new Promise((resolve) => setTimeout(resolve, 1000));
    if (!busy) showStatus(await request("/api/status"));
  }
}

act(async () => {
  history.replaceState(null, "", "/");
  showStatus(await request("/api/status"));
  await showNext();
  watchFeatures().catch(report);
});

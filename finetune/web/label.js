"use strict";

const KEYS = "123456789abcdefghijklmnopqrstuvwxyz";
const FEW_LABELS = 5;
const isMulti = document.body.dataset.multi === "true";
const isReview = document.body.dataset.review === "true";
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
  const response = await fetch(path, options).catch(() => {
    throw new Error("The server has stopped. Restart finetune label.");
  });
  const content = await response.json().catch(() => ({ error: `The server responded with status ${response.status}.` }));
  if (!response.ok) throw Object.assign(new Error(content.error), { status: response.status });
  return content;
}

// The server rejects what is based on an older state than its own, until the person confirms.
async function change(path, body, seen) {
  try {
    showStatus(await request(path, { ...body, ...seen }));
  } catch (error) {
    if (error.status !== 412) throw error;
    const isWanted = confirm(`Changed in another tab or in the file: ${error.message}. Continue anyway?`);
    showStatus(await (isWanted ? request(path, body) : request("/api/status")));
  }
}

function make(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function makeButton(text, act) {
  const button = make("button", text, { type: "button" });
  button.addEventListener("click", act);
  return button;
}

function show(id, text) {
  element(id).textContent = text;
  element(id).hidden = !text;
}

async function act(work) {
  if (busy) return;
  busy = true;
  document.body.dataset.busy = "true";
  try {
    show("error", "");
    await work();
  } catch (error) {
    show("error", error.message);
  } finally {
    busy = false;
    delete document.body.dataset.busy;
  }
}

const words = (label) => (Array.isArray(label) ? label.join(", ") || "none" : label);
const percent = (fraction) => `${Math.round(100 * fraction)}%`;
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

// Pieces of a text have [piece, whether it is marked].
function showText(container, row, pieces = {}) {
  const names = ["text", "text_pair"].filter((name) => row[name] !== undefined);
  container.replaceChildren(...names.map((name) => {
    const paragraph = make("p", "", { class: "text" });
    const parts = pieces[name] || [[row[name], false]];
    paragraph.append(...parts.map(([part, isWord]) => (isWord ? make("mark", part) : part)));
    return paragraph;
  }));
  container.classList.toggle("pair", row.text_pair !== undefined);
}

async function showNext(row) {
  try {
    current = await request(row ? `/api/next?row=${row}` : "/api/next");
  } catch (error) {
    if (error.status !== 404) throw error;
    current = null;
    element("text").replaceChildren(make("p", "All texts are labeled or skipped."));
  }
  chosen = new Set(current && current.label !== null ? [current.label].flat() : []);
  showSuggestion();
  showClasses();
}

function showSuggestion(pieces) {
  const suggestion = current && current.suggestion;
  const isShown = suggestion && (isReview || element("show-suggestion").checked);
  const probability = suggestion && suggestion.probability ? ` (${percent(suggestion.probability)})` : "";
  if (current) showText(element("text"), current, isShown ? pieces : {});
  const marked = new Set([...element("text").querySelectorAll("mark")].map((mark) => mark.textContent));
  const reason = marked.size ? `. Words that support it: ${[...marked].join(", ")}` : "";
  show("label-now", current && current.label !== null ? `Label: ${words(current.label)}` : "");
  show("suggestion", isShown ? `Suggestion: ${words(suggestion.label)}${probability}${reason}` : "");
  if (isShown && !pieces) markWords(current).catch((error) => show("error", error.message));
}

// Before the response arrives, another text may be shown, or the model may suggest another class.
async function markWords(row) {
  const pieces = await request(`/api/words?row=${row.row}`);
  if (row === current && words(pieces.label) === words(row.suggestion.label)) showSuggestion(pieces);
}

function showClasses() {
  const names = Object.keys(status.classes);
  const focused = [...element("classes").children].indexOf(document.activeElement);
  element("classes").replaceChildren(...names.map((name, index) => {
    const button = makeButton(name, () => choose(name));
    if (KEYS[index]) button.append(make("kbd", KEYS[index]));
    button.append(make("span", String(status.classes[name]), { class: "muted" }));
    if (isMulti || chosen.has(name)) button.setAttribute("aria-pressed", String(chosen.has(name)));
    button.disabled = current === null;
    return button;
  }));
  if (focused >= 0 && names[focused]) element("classes").children[focused].focus();
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
  const features = content.features < 1 && !content.error
    ? ` Encoding texts: ${percent(content.features)}.` : "";
  const skipped = content.skipped ? `, ${content.skipped} skipped` : "";
  element("progress").textContent =
    `${content.labeled} of ${count(content.texts, "text")} labeled${skipped}.${features}`;
  show("model-error", content.error &&
    `The model failed: ${content.error}. You can continue to label without suggestions.`);
  element("file").textContent = content.file;
  element("command").textContent = content.command;
  show("advice", advise(content));
  showClasses();
}

// Says how good the model is, and whether more labels are worth it.
function advise({ agreement, suggestions, classes }) {
  const sentences = [];
  const few = Object.keys(classes).filter((name) => classes[name] < FEW_LABELS);
  if (agreement) {
    sentences.push(`On ${count(agreement.texts, "random text")}, the model has ${agreement.metric} ` +
      `${percent(agreement.value)} (95% CI ${percent(agreement.low)}–${percent(agreement.high)}).`);
  }
  if (suggestions.last) {
    sentences.push(`${suggestions.agreed} of its last ${count(suggestions.last, "suggestion")} matched your label.`);
  }
  if (few.length) sentences.push(`Classes with fewer than ${FEW_LABELS} labels: ${few.join(", ")}.`);
  if (!agreement || suggestions.last < 30 || few.length) sentences.push("Label more texts.");
  else if (suggestions.agreed < 27) sentences.push("More labels still improve the model.");
  else if (agreement.high - agreement.low > 0.2) sentences.push("More labels hardly change the model. They only narrow the interval.");
  else sentences.push("You can stop: more labels will hardly change the model.");
  return sentences.join(" ");
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
  await change("/api/label", { row: current.row, label: value }, { was: current.label });
  await showNext();
});

const undo = () => act(async () => {
  await change("/api/undo", {}, { undoable: status.undoable });
  await showNext();
});

function done() {
  if (isReview && !isMulti) label(current && current.label);
  else if (isMulti && chosen.size) label([...chosen]);
  else if (isMulti) show("error", "Choose a class, or press 0 if none fits.");
}

async function showView(view) {
  for (const tab of document.querySelectorAll(".tab")) {
    tab.setAttribute("aria-pressed", String(tab.dataset.view === view));
    element(`view-${tab.dataset.view}`).hidden = tab.dataset.view !== view;
  }
  if (view === "doubts") await showDoubts();
  if (view === "texts") await showTexts();
}

function card(row, note, ...buttons) {
  const made = document.createElement("article");
  const texts = document.createElement("div");
  const actions = make("div", "", { class: "actions" });
  showText(texts, row);
  actions.append(...buttons, makeButton(row.label === null ? "Label it" : "Change", () => act(async () => {
    await showView("label");
    await showNext(row.row);
  })));
  made.append(texts, make("p", note, { class: "muted" }), actions);
  return made;
}

async function showDoubts() {
  const rows = await request("/api/contradictions");
  const cards = rows.map((row) => {
    const set = (value) => act(async () => {
      await change("/api/label", { row: row.row, label: value }, { was: row.label });
      made.remove();
    });
    const made = card(row, `Your label: ${words(row.label)}. Model: ${words(row.predicted)}.`,
      makeButton("Confirm", () => set(row.label)), makeButton(`Change to ${words(row.predicted)}`, () => set(row.predicted)));
    return made;
  });
  element("doubts").replaceChildren(...(cards.length ? cards : [make("p", "The model agrees with all labels.")]));
}

async function showTexts() {
  const query = new URLSearchParams(new FormData(element("search")));
  const rows = await request(`/api/texts?${query}`);
  const cards = rows.map((row) => card(row, row.label === null ? "skipped" : words(row.label)));
  element("texts").replaceChildren(...(cards.length ? cards : [make("p", "No matching texts.")]));
}

const plain = (name) => name.toLowerCase().replace(/[\s_-]+/g, " ").trim();

// A class that differs from another only in case or spaces is usually a typing error.
function isMeant(name, old) {
  const alike = Object.keys(status.classes).find(
    (other) => other !== old && other !== name.trim() && plain(other) === plain(name));
  return !alike || confirm(`The class "${alike}" already exists. Is "${name}" a different class?`);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("button, input, select, textarea, summary, a") || element("view-label").hidden) return;
  const index = KEYS.indexOf(event.key.toLowerCase());
  const name = Object.keys(status.classes)[index];
  if (event.key === " ") label(null);
  else if (event.key === "Backspace") undo();
  else if (event.key === "Enter") done();
  else if (event.key === "0" && isMulti) label([]);
  else if (event.key === "." && isReview && current) label(current.suggestion.label);
  else if (index >= 0 && name !== undefined) choose(name);
  else return;
  event.preventDefault();
});

// After a click, the keys are shortcuts again. After a key, the focus stays where it is.
document.addEventListener("click", (event) => {
  const control = event.target.closest("button, summary, [type=checkbox]");
  if (event.detail && control && !element("view-label").hidden) element("text").focus({ preventScroll: true });
});
element("skip").addEventListener("click", () => label(null));
element("undo").addEventListener("click", undo);
for (const [id, work] of [["done", done], ["none", () => label([])], ["take", () => current && label(current.suggestion.label)]]) {
  if (element(id)) element(id).addEventListener("click", work);
}
if (!isReview) element("show-suggestion").addEventListener("change", () => showSuggestion());
element("add-class").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = element("class-name").value;
  if (!isMeant(name)) return;
  act(async () => {
    showStatus(await request("/api/classes", { name }));
    event.target.reset();
    element("text").focus();
  });
});
element("rename-class").addEventListener("submit", (event) => {
  event.preventDefault();
  const [name, newName] = [element("old-name").value, element("new-name").value];
  const labels = count(status.classes[name], "label");
  const isWanted = newName.trim() ? isMeant(newName, name) : confirm(`Delete the class "${name}" and its ${labels}?`);
  if (!isWanted) return;
  act(async () => {
    showStatus(await request("/api/classes", { name, new_name: newName.trim() }));
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
  watchFeatures().catch((error) => show("error", error.message));
});

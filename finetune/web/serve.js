"use strict";

const element = (id) => document.getElementById(id);

function cell(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

const MAX_SHOWN = 10;

function showAnswer(scores) {
  if (scores.length === 1 && scores[0].label === null) {
    element("answer").replaceChildren(cell("p", "The text is blank."));
    return;
  }
  const table = document.createElement("table");
  const isValue = document.body.dataset.classes === "0"; // of a regression
  for (const { label, score } of scores) {
    const row = document.createElement("tr");
    row.append(cell("td", label), cell("td", isValue ? Number(score.toPrecision(6)) : score.toFixed(3)));
    table.append(row);
  }
  element("answer").replaceChildren(scores.length ? table : cell("p", "No prediction (the model abstained)."));
  const count = Number(document.body.dataset.classes);
  if (scores.length < count) element("answer").append(cell("p", `Top ${scores.length} of ${count} classes.`));
}

async function classify() {
  const text = element("text").value;
  const isPair = document.body.dataset.pairs === "true";
  const inputs = isPair ? { text, text_pair: element("text-pair").value } : text;
  const body = JSON.stringify({ inputs: [inputs], parameters: { top_k: MAX_SHOWN } });
  const headers = { "Content-Type": "application/json" };
  element("error").hidden = true;
  try {
    const response = await fetch("/predict", { method: "POST", headers, body });
    const content = await response.json();
    if (!response.ok) throw new Error(content.error);
    showAnswer(content[0]);
  } catch (error) {
    element("error").textContent = error.message;
    element("error").hidden = false;
  }
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) element("try").requestSubmit();
});
element("try").addEventListener("submit", (event) => {
  event.preventDefault();
  classify();
});
if (location.search) history.replaceState(null, "", "/");

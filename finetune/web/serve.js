"use strict";

const element = (id) => document.getElementById(id);

function cell(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

function showAnswer(scores) {
  const table = document.createElement("table");
  for (const { label, score } of scores) {
    const row = document.createElement("tr");
    row.append(cell("td", label), cell("td", score.toFixed(3)));
    table.append(row);
  }
  element("answer").replaceChildren(scores.length ? table : cell("p", "No class."));
}

async function classify() {
  const text = element("text").value;
  const isPair = document.body.dataset.pairs === "true";
  const inputs = isPair ? { text, text_pair: element("text-pair").value } : text;
  const body = JSON.stringify({ inputs: [inputs], parameters: { top_k: 5 } });
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

element("try").addEventListener("submit", (event) => {
  event.preventDefault();
  classify();
});
if (location.search) history.replaceState(null, "", "/");

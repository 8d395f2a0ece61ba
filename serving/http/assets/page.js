// The page at "/": asks a model, and shows batches as they happen. Whatever comes from the endpoint is put in as text.
import { DrawingPad, squareOf } from "./drawing.js";
import { Batches } from "./batches.js";
import { Text } from "./text.js";

const $ = (id) => document.getElementById(id);
const BURST = 32;
let models = [], model = null, pad = null, text = null;

function token() {
  try { return sessionStorage.getItem("token"); } catch { return null; }
}

function headers(more = {}) {
  return token() ? { ...more, Authorization: `Bearer ${token()}` } : more;
}

function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

// -- starting

async function start() {
  const answer = await fetch("models", { headers: headers() });
  if (answer.status === 401) return askForToken();
  if (!answer.ok) throw new Error((await answer.json()).error);
  models = await answer.json();
  $("sign-in").hidden = true;
  $("content").hidden = false;
  $("metrics-link").hidden = Boolean(token());
  $("model").replaceChildren(...models.map(({ name }) => new Option(name, name)));
  $("model").closest("label").hidden = models.length < 2;
  text ??= new Text($, headers, refreshText);
  choose(models[0]);
  new Batches($, headers).follow();
}

async function refreshText() {
  try {
    const answer = await fetch("models", { headers: headers() });
    const found = answer.ok && (await answer.json()).find(({ name }) => name === model.name);
    if (found) text.show(found);
  } catch { /* the stream of batches says that the endpoint is gone */ }
}

function askForToken() {
  $("sign-in").hidden = false;
  if (token()) {
    $("sign-in-problem").textContent = "This token is not valid.";
    $("sign-in-problem").hidden = false;
  }
  $("token").focus();
  setConnection("", "signed out");
}

export function setConnection(state, text) {
  $("connection").className = `connection ${state}`;
  $("connection").textContent = text;
}

function choose(chosen) {
  if (!chosen) {
    $("answer").replaceChildren(make("p", "No model is served yet.", "soft"));
    return;
  }
  model = chosen;
  const shapes = (specs) => specs.map((spec) => spec.dtype === "object" ? "any" : `${spec.dtype}[${spec.shape.map((size) => size ?? "any").join(", ")}]`).join(", ");
  $("model-name").textContent = `${models.length < 2 ? model.name : ""} ${shapes(model.inputs)} → ${shapes(model.outputs)}`;
  const side = squareOf(model);
  $("drawing").hidden = !side;
  $("json-details").open = !side;
  pad = side ? new DrawingPad($("pad"), $("seen"), model, side, (inputs) => { setInputs(inputs); ask(); }) : null;
  $("answer").replaceChildren(make("p", "Nothing asked yet.", "soft"));
  setInputs(model.example);
  text.show(model);
}

function setInputs(inputs) {
  $("json").value = JSON.stringify(inputs);
  showCurl();
}

function showCurl() {
  const address = new URL("predict", document.baseURI);
  if (models.length > 1) address.searchParams.set("model", model.name);
  const auth = token() ? ' -H "Authorization: Bearer $TOKEN"' : "";
  const body = `{"inputs": ${$("json").value}}`.replaceAll("'", "'\\''");
  $("curl").textContent = `curl '${address}' -H 'Content-Type: application/json'${auth} -d '${body}'`;
}

// -- asking

async function post(path, body) {
  const started = performance.now();
  const answer = await fetch(`${path}?model=${encodeURIComponent(model.name)}`, {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body,
  });
  const told = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(told.error), { status: answer.status, id: told.request_id });
  return { told, took: performance.now() - started };
}

let asked = 0;
async function ask() {
  const number = ++asked;
  let shown;
  try {
    const { told, took } = await post("predict", `{"inputs": ${$("json").value}}`);
    shown = showAnswer(told.outputs, took);
  } catch (error) {
    shown = [showProblem(error)];
  }
  if (number === asked) $("answer").replaceChildren(...shown);
}

// In one request of many samples, each of which the endpoint queues by itself: a browser sends but six requests at a time.
async function askManyTimes() {
  $("burst").disabled = true;
  try {
    const samples = Array(BURST).fill($("json").value).join(", ");
    const { told, took } = await post("invocations", `{"inputs": [${samples}]}`);
    $("answer").replaceChildren(make("p", `${told.predictions.length} answers in ${took.toFixed(1)} ms.`));
  } catch (error) {
    $("answer").replaceChildren(showProblem(error));
  }
  $("burst").disabled = false;
}

function showProblem(error) {
  const text = error.status ? `${error.status}: ${error.message} (request ${error.id})` : `No answer: ${error.message}`;
  const problem = make("p", text, "problem");
  problem.setAttribute("role", "alert");
  return problem;
}

function showAnswer(outputs, took) {
  const time = make("span", `${took.toFixed(1)} ms, seen from here`, "soft");
  const isScores = Array.isArray(outputs) && outputs.length > 1 && outputs.length <= 20 && outputs.every(Number.isFinite);
  if (!isScores) return [make("pre", JSON.stringify(outputs, null, 1)), time];
  const parts = probabilities(outputs), best = parts.indexOf(Math.max(...parts));
  const verdict = make("div", "", "verdict");
  const name = (index) => String(model.class_names.length === parts.length ? model.class_names[index] : index);
  verdict.append(make("b", name(best)), make("span", `${(parts[best] * 100).toFixed(1)} % sure`, "soft"), time);
  const bars = make("div", "", "bars");
  parts.forEach((part, index) => {
    const meter = document.createElement("meter");
    meter.value = part;
    meter.className = index === best ? "is-first" : "";
    meter.setAttribute("aria-label", `${name(index)}: ${(part * 100).toFixed(1)} %`);
    bars.append(make("span", name(index)), meter, make("span", `${(part * 100).toFixed(1)} %`));
  });
  return [verdict, bars];
}

function probabilities(scores) {
  const sum = scores.reduce((total, score) => total + score, 0);
  if (scores.every((score) => score >= 0) && Math.abs(sum - 1) < 1e-3) return scores;
  const most = Math.max(...scores), powers = scores.map((score) => Math.exp(score - most));
  const total = powers.reduce((all, power) => all + power, 0);
  return powers.map((power) => power / total);
}

// -- what the user does

$("model").addEventListener("change", () => choose(models.find(({ name }) => name === $("model").value)));
$("json").addEventListener("input", showCurl);
$("send").addEventListener("click", ask);
$("burst").addEventListener("click", askManyTimes);
$("clear").addEventListener("click", () => pad?.clear());
$("show-example").addEventListener("click", () => { pad?.show(model.example); setInputs(model.example); ask(); });
$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  try { sessionStorage.setItem("token", $("token").value.trim()); } catch { /* it is asked for again */ }
  begin();
});

async function begin() {
  try { await start(); } catch (error) {
    $("content").hidden = false;
    $("answer").replaceChildren(showProblem(error));
    setConnection("is-lost", "no answer");
  }
}
begin();

// A pad to draw a digit on, and the picture that the model gets of it.
const SUPER = 4;        // the picture is drawn this much finer, then averaged: as the digits of UCI were made
const STROKE = 0.115;   // width of a stroke, as a part of the digit's height

/** The side of a model's square image, or 0 where its input is none. */
export function squareOf({ inputs, outputs }) {
  if (inputs.length !== 1 || outputs.length !== 1 || !inputs[0].dtype.startsWith("float")) return 0;
  const shape = inputs[0].shape, pixels = shape.reduce((product, size) => product * size, 1);
  const side = Math.round(Math.sqrt(pixels));
  const isDigit = [8, 28].includes(side) && side * side === pixels;
  return isDigit && (shape.length === 1 || (shape.at(-1) === side && shape.at(-2) === side)) ? side : 0;
}

export class DrawingPad {
  constructor(canvas, seen, model, side, onDrawn) {
    this.canvas = canvas;
    this.seen = seen;
    this.side = side;
    this.shape = model.inputs[0].shape;
    this.scale = Math.max(1, ...model.example.flat(Infinity));   // white is 1, 16 or 255: as in the example
    this.onDrawn = onDrawn;
    this.strokes = [];
    canvas.onpointerdown = (event) => this.begin(event);
    canvas.onpointermove = (event) => this.go(event);
    canvas.onpointerup = canvas.onpointercancel = () => this.end();
    matchMedia("(prefers-color-scheme: dark)").onchange = () => this.draw();
    this.clear();
  }

  clear() {
    this.strokes = [];
    this.picture = new Float32Array(this.side * this.side);
    this.draw();
  }

  /** Show values that are no drawing. */
  show(example) {
    this.strokes = [];
    this.picture = Float32Array.from(example.flat(Infinity), (value) => value / this.scale);
    this.draw();
  }

  begin(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.drawing = true;
    this.strokes.push([this.place(event)]);
    this.draw();
  }

  go(event) {
    if (!this.drawing) return;
    for (const each of event.getCoalescedEvents?.() ?? [event]) this.strokes.at(-1).push(this.place(each));
    this.draw();
  }

  end() {
    if (!this.drawing) return;
    this.drawing = false;
    this.picture = this.render();
    this.draw();
    this.onDrawn(this.values());
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  /** The strokes in the middle, as large as the digits that such models learn from, in shades from 0 to 1. */
  render() {
    const fine = this.side * SUPER, points = this.strokes.flat();
    const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
    const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const room = fine * (this.side > 8 ? 20 / 28 : 1), width = Math.max(2, room * STROKE);
    const size = Math.max(right - left, bottom - top, 0.05), factor = (room - width) / size;
    const canvas = new OffscreenCanvas(fine, fine), context = canvas.getContext("2d", { willReadFrequently: true });
    const toFine = ([x, y]) => [(x - (left + right) / 2) * factor + fine / 2, (y - (top + bottom) / 2) * factor + fine / 2];
    trace(context, this.strokes.map((stroke) => stroke.map(toFine)), width, "#fff");
    const alpha = context.getImageData(0, 0, fine, fine).data, picture = new Float32Array(this.side * this.side);
    for (let pixel = 0; pixel < fine * fine; pixel++) {
      const row = Math.floor(Math.floor(pixel / fine) / SUPER), column = Math.floor((pixel % fine) / SUPER);
      picture[row * this.side + column] += (alpha[pixel * 4 + 3] > 127 ? 1 : 0) / (SUPER * SUPER);
    }
    return picture;
  }

  values() {
    let values = Array.from(this.picture, (value) => +(value * this.scale).toFixed(4));
    for (const size of this.shape.slice(1).reverse()) {
      values = Array.from({ length: values.length / size }, (_, index) => values.slice(index * size, (index + 1) * size));
    }
    return values;
  }

  draw() {
    const context = this.canvas.getContext("2d"), { width, height } = this.canvas;
    const ink = getComputedStyle(this.canvas).color;
    context.clearRect(0, 0, width, height);
    const scaled = this.strokes.map((stroke) => stroke.map(([x, y]) => [x * width, y * height]));
    trace(context, scaled, width * 0.07, ink);
    if (!this.strokes.length) paint(context, this.picture, this.side, width, ink);
    const seen = this.seen.getContext("2d");
    seen.clearRect(0, 0, this.seen.width, this.seen.height);
    paint(seen, this.picture, this.side, this.seen.width, ink);
  }
}

function trace(context, strokes, width, colour) {
  context.lineCap = context.lineJoin = "round";
  context.lineWidth = width;
  context.strokeStyle = colour;
  for (const stroke of strokes) {
    context.beginPath();
    context.moveTo(...stroke[0]);
    for (const point of stroke) context.lineTo(...point);
    context.stroke();
  }
}

function paint(context, picture, side, width, colour) {
  const cell = width / side;
  context.fillStyle = colour;
  picture.forEach((value, index) => {
    context.globalAlpha = Math.max(0, Math.min(1, value));
    context.fillRect((index % side) * cell, Math.floor(index / side) * cell, cell + 0.5, cell + 0.5);
  });
  context.globalAlpha = 1;
}

// Shows a line and the values at the pointer. The numbers are in each plot's data-chart.
for (const plot of document.querySelectorAll("[data-chart]")) {
  const chart = JSON.parse(plot.dataset.chart), rule = plot.querySelector(".rule"), tip = plot.querySelector(".tip");
  const line = (text, colour) => {
    const row = document.createElement("div");
    row.textContent = text;
    if (colour) row.className = "key " + colour;
    return row;
  };
  const nearest = (xs, x) => xs.reduce((best, at, i) => (Math.abs(at - x) < Math.abs(xs[best] - x) ? i : best), 0);
  const number = (value) => value.toLocaleString("en", { maximumSignificantDigits: 5 });
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(), part = (event.clientX - box.left) / box.width;
    const x = chart.x[0] + part * (chart.x[1] - chart.x[0]);
    let rows, at = x;
    if (chart.boxes) {
      const found = chart.boxes.find(([begin, end]) => begin <= x && x <= end);
      rows = [line(found ? found[2] : "idle")];
    } else {
      const [, , xs] = chart.series.reduce((a, b) => (b[2].length > a[2].length ? b : a));
      at = xs[nearest(xs, x)];
      rows = [line(chart.name + " " + Math.round(at).toLocaleString("en"))];
      for (const [name, colour, own, ys] of chart.series) rows.push(line(name + " " + number(ys[nearest(own, at)]), colour));
    }
    const left = ((at - chart.x[0]) / (chart.x[1] - chart.x[0])) * 100;
    tip.replaceChildren(...rows);
    rule.style.left = left + "%";
    tip.style.left = left < 50 ? left + "%" : "auto";
    tip.style.right = left < 50 ? "auto" : 100 - left + "%";
    rule.hidden = tip.hidden = false;
  });
  plot.addEventListener("pointerleave", () => (rule.hidden = tip.hidden = true));
}

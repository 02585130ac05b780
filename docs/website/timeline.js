// A pipeline's step, action by action: choose a schedule, then move through time with the slider,
// the buttons or the arrow keys. The data come from the schedules themselves (timelines.py).
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const LANE = 26, LEFT = 52, WIDTH = 900, RIGHT = 150, TOP = 6;

  function element(parent, name, attributes = {}, words = "") {
    const svg = ["svg", "rect", "text", "line", "title", "g"].includes(name);
    const made = svg ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (words) made.textContent = words;
    parent.append(made);
    return made;
  }

  // whether white or black digits are read better on a colour
  function ink(colour) {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
    return 0.299 * r + 0.587 * g + 0.114 * b < 128 ? "#ffffff" : "#1f2937";
  }

  function describe(rank, action) {
    const words = `rank ${rank}: ${action.kind} of micro-batch ${action.microbatch}, stage ${action.stage}`;
    if (action.sends_to === null) return words;
    const what = action.kind === "forward" ? "its hidden states" : "the gradient of its input";
    return `${words}; then sends ${what} to rank ${action.sends_to}`;
  }

  function build(root) {
    const all = JSON.parse(root.dataset.timelines);
    const longest = Math.max(...all.map((one) => one.span));
    const scale = (WIDTH - LEFT - RIGHT) / longest;
    const x = (time) => LEFT + time * scale;

    const choices = element(root, "div", {class: "choices", role: "group", "aria-label": "schedule"});
    const lanes = element(root, "div", {class: "lanes", tabindex: "0", role: "group",
      "aria-label": "timeline: arrow keys step through it"});
    const controls = element(root, "div", {class: "controls"});
    const back = element(controls, "button", {type: "button", "aria-label": "one step back"}, "◀");
    const on = element(controls, "button", {type: "button", "aria-label": "one step on"}, "▶");
    const slider = element(controls, "input", {type: "range", min: 0, value: 0, "aria-label": "time"});
    const time = element(controls, "span");
    const said = element(root, "ul", {class: "said", "aria-live": "polite"});
    const caption = element(root, "p");

    let boxes = [], held = [], times = [], clock = null, shown = null;

    function show(step) {
      const now = times[step];
      slider.value = step;
      time.textContent = `time ${Number(now.toFixed(2))} of ${Number(shown.span.toFixed(2))}`;
      slider.setAttribute("aria-valuetext", time.textContent);
      said.replaceChildren();
      held.forEach((text) => (text.textContent = "holds 0"));
      shown.ranks.forEach((actions, rank) => {
        const begun = actions.filter((action) => action.start <= now + 1e-9);
        const last = begun[begun.length - 1];
        const running = last && last.end > now + 1e-9;
        if (running) element(said, "li", {}, describe(rank, last));
        else element(said, "li", {}, `rank ${rank}: ${begun.length < actions.length ? "waits" : "has finished"}`);
        const before = begun.length > 1 ? begun[begun.length - 2].held : 0;
        const kept = !last ? 0 : running ? Math.max(before, last.held) : last.held;
        held[rank].textContent = `holds ${Number(kept.toFixed(2))}`;
      });
      for (const {box, action} of boxes) {
        const begun = action.start <= now + 1e-9;
        box.classList.toggle("later", !begun);
        box.classList.toggle("now", begun && action.end > now + 1e-9);
      }
      clock.setAttribute("x1", x(now));
      clock.setAttribute("x2", x(now));
    }

    function choose(one) {
      shown = one;
      for (const button of choices.children) {
        button.setAttribute("aria-pressed", String(button.textContent === one.name));
      }
      lanes.replaceChildren();
      const height = TOP + one.ranks.length * LANE + 6;
      const svg = element(lanes, "svg", {viewBox: `0 0 ${WIDTH} ${height}`, role: "img"});
      element(svg, "title", {}, `${one.name}, ${one.ranks.length} ranks`);
      boxes = [];
      held = one.ranks.map((actions, rank) => {
        const y = TOP + rank * LANE;
        element(svg, "text", {x: 0, y: y + 16, "font-size": 12}, `rank ${rank}`);
        element(svg, "rect", {class: "idle", x: LEFT, y: y + 2, width: one.span * scale, height: LANE - 4});
        for (const action of actions) {
          const group = element(svg, "g", {class: "action"});
          const width = (action.end - action.start) * scale - 1;
          element(group, "rect", {x: x(action.start), y: y + 2, width, height: LANE - 4, fill: action.colour});
          if (width > 9) {
            const digits = element(group, "text", {x: x(action.start) + width / 2, y: y + 17,
              "font-size": 11, "text-anchor": "middle"}, String(action.microbatch));
            digits.style.fill = ink(action.colour);
          }
          element(group, "title", {}, describe(rank, action));
          boxes.push({box: group, action});
        }
        return element(svg, "text", {x: LEFT + longest * scale + 12, y: y + 16, "font-size": 12});
      });
      clock = element(svg, "line", {class: "clock", y1: 0, y2: height});
      const starts = one.ranks.flat().flatMap((action) => [action.start, action.end]);
      times = [...new Set(starts.map((start) => Number(start.toFixed(6))))].sort((a, b) => a - b);
      slider.max = times.length - 1;
      caption.textContent = one.caption;
      show(0);
    }

    const move = (by) => show(Math.min(times.length - 1, Math.max(0, Number(slider.value) + by)));
    for (const one of all) {
      const button = element(choices, "button", {type: "button"}, one.name);
      button.addEventListener("click", () => choose(one));
    }
    slider.addEventListener("input", () => show(Number(slider.value)));
    back.addEventListener("click", () => move(-1));
    on.addEventListener("click", () => move(1));
    lanes.addEventListener("keydown", (event) => {
      const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (!by) return;
      event.preventDefault();
      move(by);
    });
    choose(all[0]);
  }

  const start = () => document.querySelectorAll(".timeline[data-timelines]").forEach(build);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();

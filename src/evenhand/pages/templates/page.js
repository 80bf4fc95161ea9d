"use strict";
// Behaviour that every page shares: light and dark, values of curves on hovering, series on and off.
(() => {
  const root = document.documentElement;
  const store = {
    get(key) { try { return localStorage.getItem(key); } catch { return null; } },
    set(key, value) { try { localStorage.setItem(key, value); } catch { /* a file page may not */ } },
  };
  const saved = store.get("evenhand-theme");
  if (saved === "dark" || saved === "light") root.dataset.theme = saved;
  for (const button of document.querySelectorAll("button.theme")) {
    button.addEventListener("click", () => {
      const dark = root.dataset.theme
        ? root.dataset.theme === "dark"
        : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      store.set("evenhand-theme", root.dataset.theme);
    });
  }

  for (const box of document.querySelectorAll("input[data-series]")) {
    const apply = () => {
      for (const part of document.querySelectorAll("." + box.dataset.series + ":not(.swatch)")) {
        part.classList.toggle("off", !box.checked);
      }
    };
    box.addEventListener("change", apply);
    apply();
  }

  const plots = document.querySelectorAll("svg.curves");
  if (!plots.length) return;
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const short = (value) => Number(value.toPrecision(4)).toString();
  const nearest = (xs, x) => {
    let best = 0;
    for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
    return best;
  };
  const hide = (plot) => { tip.hidden = true; plot.classList.remove("live"); };
  const show = (plot, event) => {
    const data = plot.plotData || (plot.plotData = JSON.parse(plot.dataset.plot));
    const [low, high, left, right, width] = data.x;
    const frame = plot.getBoundingClientRect();
    const at = ((event.clientX - frame.left) / frame.width) * width;
    if (at < left - 6 || at > right + 6) { hide(plot); return; }
    const wanted = low + ((at - left) / (right - left)) * (high - low);
    const rows = [];
    let step = null;
    for (const curve of data.curves) {
      if (plot.querySelector(".series." + curve.style)?.classList.contains("off")) continue;
      const i = nearest(curve.x, wanted);
      if (curve.y[i] === null) continue;
      if (step === null || Math.abs(curve.x[i] - wanted) < Math.abs(step - wanted)) step = curve.x[i];
      rows.push([curve, i]);
    }
    if (step === null) { hide(plot); return; }
    tip.replaceChildren();
    const head = document.createElement("div");
    head.textContent = "step " + short(step);
    tip.append(head);
    for (const [curve, i] of rows) {
      const line = document.createElement("div");
      const mark = document.createElement("i");
      mark.className = "swatch " + curve.style;
      line.append(mark, curve.label + " ");
      const value = document.createElement("b");
      value.textContent = short(curve.y[i]);
      line.append(value);
      if (curve.low && curve.low[i] !== null) {
        line.append(" [" + short(curve.low[i]) + ", " + short(curve.high[i]) + "]");
      }
      tip.append(line);
    }
    const x = left + ((step - low) / (high - low || 1)) * (right - left);
    const cursor = plot.querySelector(".cursor");
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    plot.classList.add("live");
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const room = document.documentElement.clientWidth - box.width - 8;
    tip.style.left = Math.max(8, Math.min(event.clientX + 14, room)) + "px";
    tip.style.top = Math.max(8, event.clientY - box.height - 12) + "px";
  };
  for (const plot of plots) {
    plot.addEventListener("pointermove", (event) => show(plot, event));
    plot.addEventListener("pointerleave", () => hide(plot));
  }
})();

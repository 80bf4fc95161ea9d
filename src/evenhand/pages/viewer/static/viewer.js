"use strict";
// The list, the rollout beside it, the keyboard, and following a run. Markup comes from the server.
(() => {
  const POLL = 2000;
  const by = (id) => document.getElementById(id);
  const [form, list, detail, help] = [by("filters"), by("rows"), by("detail"), by("help")];
  const followButton = by("follow");
  let selected = null;       // key of the rollout that is shown
  let changes = Number(by("status").dataset.changes);
  let following = true;
  let loading = 0;           // number of the newest request for the list; older answers are dropped
  let opening = 0;
  let allOpen = false;

  const fields = () => {
    const wanted = new URLSearchParams();
    for (const [name, value] of new FormData(form)) if (value) wanted.set(name, value);
    return wanted;
  };
  const rows = () => [...list.querySelectorAll(".row")];
  const rowOf = (key) => list.querySelector(`.row[data-key="${CSS.escape(key)}"]`);
  const fragment = async (address) => {
    const answer = await fetch(address);
    return { ok: answer.ok, text: await answer.text() };
  };
  const put = (target, html) => {
    // Made by our templates, which escape whatever rollouts hold; scripts in it would not run.
    const made = document.createElement("template");
    made.innerHTML = html;
    target.replaceChildren(made.content);
  };
  const remember = () => {
    const wanted = fields().toString();
    history.replaceState(null, "", (wanted ? "?" + wanted : location.pathname) + (selected ? "#" + selected : ""));
    by("clear").hidden = !wanted;
  };

  // --- the list ---
  const load = async ({ fresh = false } = {}) => {
    const mine = ++loading;
    const before = new Set(rows().map((row) => row.dataset.key));
    let answer;
    try { answer = await fragment("rows?" + fields()); } catch { gone(); return; }
    if (mine !== loading) return;
    if (!answer.ok) {
      const message = document.createElement("p");
      message.className = "empty warned";
      message.textContent = answer.text;
      list.replaceChildren(message);
      by("total").textContent = "0";
      remember();
      return;
    }
    put(list, answer.text);
    const part = list.querySelector(".part");
    by("total").textContent = Number(part.dataset.total).toLocaleString("en");
    if (fresh) for (const row of rows()) if (!before.has(row.dataset.key)) row.classList.add("fresh");
    mark();
    watch();
    remember();
  };
  const more = async () => {
    const last = list.lastElementChild;
    const next = last && last.dataset.next;
    if (!next || last.dataset.asked) return;
    last.dataset.asked = "1";
    const mine = loading;
    const wanted = fields();
    wanted.set("offset", next);
    let answer;
    try { answer = await fragment("rows?" + wanted); } catch { delete last.dataset.asked; return; }
    if (mine !== loading || !answer.ok) return;
    const made = document.createElement("template");
    made.innerHTML = answer.text;
    list.append(made.content);
    mark();
    watch();
  };
  const seen = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) more();
  }, { rootMargin: "600px" });
  const watch = () => {
    seen.disconnect();
    const last = list.querySelector(".part:last-child .row:last-of-type");
    if (last) seen.observe(last);
  };
  const mark = () => {
    for (const row of rows()) row.setAttribute("aria-selected", String(row.dataset.key === selected));
  };

  // --- one rollout ---
  const show = async (key, { reveal = true } = {}) => {
    const mine = ++opening;
    selected = key;
    mark();
    if (reveal) rowOf(key)?.scrollIntoView({ block: "nearest" });
    let answer;
    try { answer = await fragment("rollout/" + encodeURIComponent(key)); } catch { gone(); return; }
    if (mine !== opening) return;
    if (answer.ok) {
      put(detail, answer.text);
      for (const token of detail.querySelectorAll(".t[data-p]")) token.title = "probability " + token.dataset.p;
      if (allOpen) toggleDocuments(true);
    } else {
      const message = document.createElement("p");
      message.className = "empty warned";
      message.textContent = answer.text;
      detail.replaceChildren(message);
    }
    detail.scrollTop = 0;
    document.body.classList.add("open");
    const cards = detail.querySelector(".members");
    const card = detail.querySelector(".current");
    if (card) cards.scrollLeft = card.offsetLeft - cards.offsetLeft - 20;
    if (matchMedia("(max-width: 760px)").matches) scrollTo(0, 0);
    remember();
  };
  const close = () => {
    if (matchMedia("(max-width: 760px)").matches && document.body.classList.contains("open")) {
      document.body.classList.remove("open");
      if (selected) rowOf(selected)?.scrollIntoView({ block: "center" });
      return true;
    }
    return false;
  };
  const walk = async (by_) => {
    let all = rows();
    if (!all.length) return;
    const at = all.findIndex((row) => row.dataset.key === selected);
    if (at + by_ >= all.length) { await more(); all = rows(); }
    const to = at < 0 ? (by_ > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + by_, 0), all.length - 1);
    show(all[to].dataset.key);
  };
  const sideways = (name) => {
    const key = detail.querySelector(".group")?.dataset[name];
    if (key) show(key);
  };
  const toggleDocuments = (open) => {
    for (const part of detail.querySelectorAll("details.document")) part.open = open;
  };

  // --- following ---
  const gone = () => { by("progress").textContent = "the server has stopped"; };
  const follow = (on) => {
    following = on;
    followButton.setAttribute("aria-pressed", String(on));
    if (on) poll();
  };
  const status = (state) => {
    const pill = by("run-state");
    pill.hidden = !state.status;
    pill.textContent = state.status;
    pill.className = "pill " + state.status;
    by("progress").textContent = state.progress;
    const notes = [];
    for (const alarm of state.alarms) {
      const note = document.createElement("button");
      note.type = "button";
      note.className = "note alarm";
      note.dataset.alarm = alarm.alarm;
      const name = document.createElement("b");
      name.textContent = alarm.alarm;
      note.append(name, ` at step ${alarm.step}: ${alarm.message}`);
      notes.push(note);
    }
    for (const problem of state.problems) {
      const note = document.createElement("p");
      note.className = "note";
      note.textContent = problem;
      notes.push(note);
    }
    by("notes").replaceChildren(...notes);
  };
  let polling = false;
  const poll = async () => {
    if (polling || document.hidden) return;
    polling = true;
    try {
      const answer = await fetch("state");
      if (!answer.ok) throw new Error(String(answer.status));
      const state = await answer.json();
      status(state);
      if (state.changes !== changes) {
        const atTop = list.scrollTop < 40 && (scrollY < 200 || !matchMedia("(max-width: 760px)").matches);
        if (following && atTop) {
          changes = state.changes;
          by("new").hidden = true;
          await load({ fresh: true });
        } else {
          by("new").textContent = "new rollouts";
          by("new").hidden = false;
        }
        by("new").dataset.changes = state.changes;
      }
    } catch { gone(); } finally { polling = false; }
  };

  // --- events ---
  let timer = 0;
  const soon = (wait) => { clearTimeout(timer); timer = setTimeout(() => { list.scrollTop = 0; load(); }, wait); };
  form.addEventListener("input", (event) => soon(event.target.tagName === "SELECT" ? 0 : 250));
  form.addEventListener("submit", (event) => { event.preventDefault(); soon(0); });
  const clear = () => {
    for (const field of form.elements) if (field.name) field.value = "";
    soon(0);
  };
  by("clear").addEventListener("click", clear);
  by("new").addEventListener("click", () => {
    changes = Number(by("new").dataset.changes);
    by("new").hidden = true;
    list.scrollTop = 0;
    load({ fresh: true });
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-key]");
    if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
      event.preventDefault();
      show(link.dataset.key, { reveal: !link.classList.contains("row") });
      return;
    }
    if (event.target.closest(".back")) close();
    const alarm = event.target.closest("button[data-alarm]");
    if (alarm && form.elements.alarm) { form.elements.alarm.value = alarm.dataset.alarm; soon(0); }
  });
  followButton.addEventListener("click", () => follow(!following));
  by("help-button").addEventListener("click", () => help.showModal());
  document.addEventListener("visibilitychange", poll);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const field = event.target.closest("input, select, textarea");
    if (field) {
      if (event.key === "Escape") { field.blur(); event.preventDefault(); }
      else if (event.key === "Enter" && field.name) { field.blur(); }
      return;
    }
    if (help.open) {
      if (event.key === "?") { help.close(); event.preventDefault(); }
      return;
    }
    const keys = {
      j: () => walk(1), ArrowDown: () => walk(1), k: () => walk(-1), ArrowUp: () => walk(-1),
      l: () => sideways("next"), ArrowRight: () => sideways("next"),
      h: () => sideways("previous"), ArrowLeft: () => sideways("previous"),
      "/": () => form.elements.text.focus(), "?": () => help.showModal(),
      f: () => follow(!following), t: () => document.querySelector("button.theme").click(),
      o: () => { allOpen = !allOpen; toggleDocuments(allOpen); },
      Escape: () => { if (!close() && fields().toString()) clear(); },
    };
    const action = keys[event.key];
    if (action) { event.preventDefault(); action(); }
  });

  const start = location.hash.slice(1);   // before the address is written anew without it
  watch();
  remember();
  by("run-state").classList.add(by("run-state").textContent || "none");
  if (/^\d+-\d+$/.test(start)) show(start);
  else if (rows().length && !matchMedia("(max-width: 760px)").matches) show(rows()[0].dataset.key);
  setInterval(poll, POLL);
})();

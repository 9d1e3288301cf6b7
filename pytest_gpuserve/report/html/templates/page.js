"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  document.documentElement.classList.add("scripted");

  // Copy

  const toast = document.querySelector(".toast");
  let clearing = 0;
  const say = (text) => {
    toast.textContent = text;
    clearTimeout(clearing);
    clearing = setTimeout(() => { toast.textContent = ""; }, 2500);
  };
  const byHand = (text) => {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  };
  const copy = async (text) => {
    let done = false;
    try {
      await navigator.clipboard.writeText(text);
      done = true;
    } catch {
      done = byHand(text);
    }
    say(done ? "Copied" : "The browser does not allow copying");
  };
  const stackOf = (leaf) => {
    const frames = [];
    let ranks = "";
    for (let node = leaf; node; node = node.parentElement.closest(".node")) {
      const details = node.firstElementChild;
      const own = all("li", details).filter((li) => li.parentElement.matches(".frames") && li.closest(".node") === node);
      frames.unshift(...own.map((li) => li.textContent.trim().replace(/\s+/g, " ")));
      ranks = ranks || details.querySelector("summary strong").textContent;
    }
    return `${ranks} (outermost call first)\n${frames.map((frame) => `  ${frame}`).join("\n")}\n`;
  };

  // Folding

  for (const button of all(".fold-all")) {
    button.addEventListener("click", () => {
      for (const details of all("details", document.getElementById(button.dataset.for))) {
        details.open = button.dataset.open === "yes";
      }
    });
  }
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details:not([open])").filter((details) => !details.closest("#log"));
    for (const details of closed) details.open = true;
  });
  addEventListener("afterprint", () => { for (const details of closed) details.open = false; });

  // Stacks: a filter of ranks (TP3, TP0-7) and of words

  const wantedRanks = (word) => {
    const range = /^(.*?[A-Za-z])(\d+)-(\d+)$/.exec(word);
    if (!range || +range[3] - +range[2] > 4096) return [word.toLowerCase()];
    const ranks = [];
    for (let n = +range[2]; n <= +range[3]; n += 1) ranks.push((range[1] + n).toLowerCase());
    return ranks;
  };
  const filter = document.querySelector(".filter");
  const nodes = all("#stacks .node").reverse();
  const facts = new Map(nodes.map((node) => [node, {
    ranks: new Set(node.dataset.ranks.toLowerCase().split("|")),
    words: all(":scope > details > summary, :scope > details > .frames, :scope > details > .more", node)
      .map((part) => part.textContent.toLowerCase()).join(" "),
  }]));
  const known = new Set(nodes.flatMap((node) => [...facts.get(node).ranks]));
  const filterStacks = () => {
    const words = filter.value.split(/[,;]+/).map((word) => word.trim()).filter(Boolean);
    const tests = words.map((word) => {
      const ranks = wantedRanks(word).filter((rank) => known.has(rank));
      return ranks.length ? (fact) => ranks.some((rank) => fact.ranks.has(rank))
        : (fact) => fact.words.includes(word.toLowerCase());
    });
    const isRank = words.map((word) => wantedRanks(word).some((rank) => known.has(rank)));
    const shown = new Set();
    const above = (node) => node.parentElement.closest(".node");
    for (const node of nodes) { // innermost first
      const hit = tests.every((test, n) => {
        for (let at = node; at; at = isRank[n] ? null : above(at)) if (test(facts.get(at))) return true;
        return false;
      });
      if (hit || all(":scope .node", node).some((inner) => shown.has(inner))) shown.add(node);
    }
    let count = 0;
    for (const node of nodes) {
      node.classList.toggle("hidden", !shown.has(node));
      if (shown.has(node) && !node.querySelector(".node")) count += 1;
    }
    for (const role of all("#stacks .role")) role.classList.toggle("hidden", !role.querySelector(".node:not(.hidden)"));
    document.getElementById("stacks-count").textContent = words.length ? `${count} call paths` : "";
  };
  if (filter) filter.addEventListener("input", filterStacks);

  // Log: a filter of one rank and of a text

  const rank = document.querySelector("#log .rank");
  const grep = document.querySelector("#log .grep");
  const count = document.getElementById("log-count");
  const atFirst = count ? count.textContent : "";
  const filterLog = () => {
    const wanted = rank.value;
    const text = grep.value.toLowerCase();
    let lines = 0;
    let seen = 0;
    for (const line of all("#log .lines > li")) {
      const hit = (wanted === "*" || line.dataset.r === wanted) && (!text || line.textContent.toLowerCase().includes(text));
      line.classList.toggle("hidden", !hit);
      lines += 1;
      seen += hit;
    }
    for (const fold of all("#log .fold")) fold.classList.toggle("hidden", !fold.querySelector("li:not(.hidden)"));
    count.textContent = wanted === "*" && !text ? atFirst : `${seen} of ${lines} lines`;
  };
  if (rank) {
    rank.addEventListener("change", filterLog);
    grep.addEventListener("input", filterLog);
  }

  // Curves: pick one, read values

  for (const chart of all(".chart")) {
    const curves = all(".curve", chart).map((path) => ({
      name: path.dataset.name,
      path,
      points: [...path.getAttribute("d").matchAll(/(\d+) (\d+)/g)].map((m) => [+m[1], +m[2]]),
    }));
    const picked = () => all(".pick[aria-pressed=true]", chart).map((button) => button.dataset.name);
    const draw = () => {
      const names = picked();
      for (const { name, path } of curves) {
        path.classList.toggle("on", names.includes(name));
        path.classList.toggle("off", names.length > 0 && !names.includes(name));
      }
    };
    chart.addEventListener("click", (event) => {
      const button = event.target.closest(".pick");
      if (!button) return;
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      draw();
    });
    const field = chart.querySelector(".field");
    const readout = chart.querySelector(".readout");
    const figure = (value) => {
      if (chart.dataset.unit !== "bytes") return `${+value.toPrecision(3)} ${chart.dataset.unit}`;
      const power = Math.min(3, Math.floor(Math.log2(Math.max(value, 1)) / 10));
      return `${(value / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB"][power]}`;
    };
    const at = (points, x) => {
      const after = points.findIndex((point) => point[0] >= x);
      if (after < 0) return points[points.length - 1][1];
      if (after === 0) return points[0][1];
      const [[x0, y0], [x1, y1]] = [points[after - 1], points[after]];
      return x1 === x0 ? y1 : y0 + ((y1 - y0) * (x - x0)) / (x1 - x0);
    };
    field.addEventListener("pointermove", (event) => {
      const box = field.getBoundingClientRect();
      const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      const cursor = chart.querySelector(".cursor");
      cursor.setAttribute("x1", `${part * 100}%`);
      cursor.setAttribute("x2", `${part * 100}%`);
      const names = picked();
      const wanted = curves.filter(({ name }) => !names.length || names.includes(name));
      const shown = wanted.slice(0, 8);
      const values = shown.map(({ name, points }) => `${name} ${figure((1 - at(points, part * 1000) / 1000) * chart.dataset.scale)}`);
      readout.textContent = `+${(part * chart.dataset.seconds).toFixed(1)} s: ${values.join(", ")}${wanted.length > shown.length ? " \u2026" : ""}`;
      chart.classList.add("hover");
    });
    field.addEventListener("pointerleave", () => {
      chart.classList.remove("hover");
      readout.textContent = "\u00a0";
    });
  }

  // Matrix: which axis makes the columns

  for (const pivot of all(".pivot")) {
    pivot.addEventListener("change", () => {
      for (const grid of all(".grid", document.getElementById(pivot.dataset.for))) {
        grid.classList.toggle("later", grid.dataset.column !== pivot.value);
      }
    });
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.matches(".chip")) {
      if (filter) {
        filter.value = filter.value === button.textContent ? "" : button.textContent;
        filterStacks();
        filter.focus();
      }
    } else if (button.matches(".stack")) {
      copy(stackOf(button.closest(".node")));
    } else if (button.dataset.copy) {
      copy(document.getElementById(button.dataset.copy).textContent);
    }
  });
})();

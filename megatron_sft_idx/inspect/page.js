// Links open the pack they lead into, j and k walk through the packs, which can be filtered, ordered and searched, and
// charts show the value of a bar. The page can be read without any of this.
(() => {
  const find = (name) => document.querySelector(name);
  const [viewer, choose, trained, order, left] = ["#viewer", ".choose", "#trained", "#order", "#left"].map(find);
  const [search, text, previous, next, count, searched] = [".search", "#text", "#previous", "#next", "#hits", "#searched"].map(find);
  const all = [...document.querySelectorAll("details.pack")];
  let packs = all;

  // ---- which packs are shown, and the search in them ----

  // A hit is a range of characters in the text of a sequence or the name of its input line. Hits are painted as ranges, so the
  // text and its marks stay as they are.
  let hits = [];
  let current = -1;
  // The packs that were open before the search began; null if there is no search.
  let openBefore = null;
  const painted = self.Highlight && CSS.highlights ? { hit: new Highlight(), "current-hit": new Highlight() } : {};
  for (const [name, highlight] of Object.entries(painted)) CSS.highlights.set(name, highlight);

  function counted(number, unit) {
    return `${number.toLocaleString("en-US")} ${unit}${number === 1 ? "" : "s"}`;
  }

  // Any white space matches any other, and a number of ids matches whole ids only.
  function patternOf(words) {
    const literal = words.split(/\s+/).map((word) => word.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&")).join("\\s+");
    return new RegExp(viewer.dataset.shows === "ids" ? `(?<!\\d)${literal}(?!\\d)` : literal, "giu");
  }

  function arrange() {
    const words = text.value.trim();
    const chosen = all.filter((pack) => !trained.value || pack.dataset.trained === trained.value);
    openBefore ??= words ? all.filter((pack) => pack.open) : null;
    const pattern = words && patternOf(words);
    const hitsOf = new Map(chosen.map((pack) => [pack, words ? searchPack(pack, pattern) : []]));
    for (const pack of all) pack.hidden = !hitsOf.has(pack) || Boolean(words && !hitsOf.get(pack).length);
    if (words) {
      for (const pack of chosen) pack.open = !pack.hidden;
    } else {
      showSequences(all);
      // The pack of the current hit stays open: it is where the reader is.
      if (openBefore) for (const pack of all) pack.open = openBefore.includes(pack) || pack.contains(hits[current]?.element);
      openBefore = null;
    }
    packs = chosen.filter((pack) => !pack.hidden);
    const [by, sign] = [order.value.replace("-", ""), order.value.startsWith("-") ? -1 : 1];
    if (by) packs.sort((one, other) => sign * (one.dataset[by] - other.dataset[by]));
    const rest = by ? packs : all;
    if (rest.some((pack, i) => rest[i + 1] && !(pack.compareDocumentPosition(rest[i + 1]) & 4))) viewer.append(...rest);
    left.textContent = chosen.length < all.length ? `${chosen.length} of the ${all.length} packs on this page` : "";
    hits = packs.flatMap((pack) => hitsOf.get(pack));
    current = hits.length ? 0 : -1;
    for (const element of new Set(hits.map((hit) => hit.element))) placeHits(element);
    describeSearch(words, chosen);
    paint();
    if (hits.length && !isInView(hits[0].range.getBoundingClientRect())) goTo(0);
  }

  function showSequences(some) {
    for (const pack of some) for (const one of pack.querySelectorAll("li[hidden]")) one.hidden = false;
  }

  // Only the sequences with hits stay.
  function searchPack(pack, pattern) {
    const found = [];
    for (const sequence of pack.querySelectorAll("ol.sequences > li")) {
      const before = found.length;
      for (const element of sequence.querySelectorAll(".source, .text")) {
        for (const match of element.textContent.matchAll(pattern)) found.push({ element, start: match.index, end: match.index + match[0].length });
      }
      sequence.hidden = found.length === before;
    }
    return found;
  }

  function placeHits(element) {
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    let [node, passed] = [walker.nextNode(), 0];
    const place = (offset, room) => {
      for (; offset - passed + room > node.length; node = walker.nextNode()) passed += node.length;
      return [node, offset - passed];
    };
    for (const hit of hits.filter((one) => one.element === element)) {
      hit.range = document.createRange();
      hit.range.setStart(...place(hit.start, 1));
      hit.range.setEnd(...place(hit.end, 0));
    }
  }

  function describeSearch(words, chosen) {
    const total = Number(viewer.dataset.packs);
    const cut = chosen.filter((pack) => "cut" in pack.dataset).length;
    previous.disabled = next.disabled = !hits.length;
    searched.hidden = !words;
    if (!words) return;
    let what = `Searched: the ${viewer.dataset.shows === "text" ? "text" : "token ids"} of `;
    what += chosen.length === total ? (total === 1 ? "the only pack" : `all ${counted(total, "pack")}`) : `${chosen.length.toLocaleString("en-US")} of ${counted(total, "pack")}`;
    if (trained.value) what += ", those chosen under Trained";
    if (cut) what += cut === chosen.length ? ", each only in part" : `, ${cut.toLocaleString("en-US")} only in part`;
    if (find(".source")) what += ", and the names of their input lines";
    what += ". Sequences without a hit are hidden.";
    if (viewer.dataset.shows === "text") what += " Upper and lower case are the same.";
    searched.replaceChildren(what);
    if (!viewer.dataset.command || (chosen.length === total && !cut)) return;
    const command = document.createElement("code");
    command.className = "command";
    command.append(`${viewer.dataset.command} --find='${words.replaceAll("'", "'\\''")}'`);
    searched.append(" To search the whole shard, exactly as written: ", command);
  }

  function paint() {
    painted.hit?.clear();
    painted["current-hit"]?.clear();
    hits.forEach((hit, i) => painted[i === current ? "current-hit" : "hit"]?.add(hit.range));
    const inPacks = new Set(hits.map((hit) => hit.element.closest("details"))).size;
    count.textContent = searched.hidden ? "" : hits.length ? `hit ${current + 1} of ${hits.length.toLocaleString("en-US")}, in ${counted(inPacks, "pack")}` : "no hits";
  }

  // The end of the part of the window that the search covers.
  function top() {
    return search.getBoundingClientRect().bottom;
  }

  function isInView(box) {
    return box.top >= top() && box.bottom <= innerHeight;
  }

  function goTo(number) {
    if (!hits.length) return;
    current = (number + hits.length) % hits.length;
    paint();
    const { element, range } = hits[current];
    element.closest("details").open = true;
    const box = range.getBoundingClientRect();
    if (!isInView(box)) scrollBy(0, box.top - Math.max(top(), 0.3 * innerHeight));
    // The search may have moved while the page scrolled.
    if (range.getBoundingClientRect().top < top()) scrollBy(0, range.getBoundingClientRect().top - top() - 40);
  }

  function show(pack, target) {
    if (pack.hidden || target?.hidden) {
      trained.value = text.value = "";
      arrange();
    }
    pack.open = true;
    pack.querySelector("summary").focus({ preventScroll: true });
    pack.scrollIntoView();
  }

  function showLinked() {
    const target = document.getElementById(location.hash.slice(1));
    const pack = target?.closest("details.pack");
    if (!pack) return;
    show(pack, target);
    if (target === pack) return;
    target.focus({ preventScroll: true });
    target.scrollIntoView();
  }

  function walk(step) {
    const at = packs.indexOf(document.activeElement?.closest("details.pack"));
    const pack = packs[at < 0 ? 0 : Math.min(Math.max(at + step, 0), packs.length - 1)];
    if (!pack) return;
    if (at >= 0 && packs[at] !== pack) packs[at].open = false;
    show(pack);
  }

  // The text of a sequence is cut into its tokens when the pointer first reaches it.
  function cutIntoTokens(sequence) {
    const tokens = sequence.dataset.ids.split(" ");
    delete sequence.dataset.ids;
    for (const run of [...sequence.childNodes]) {
      if (run.className === "media" || run.firstChild?.className === "media") continue;
      const [letters, parts] = [[...run.textContent], []];
      let at = 0;
      while (at < letters.length && tokens.length) {
        const [length, ids] = tokens.shift().split(".");
        const token = document.createElement("span");
        token.title = ids.split("+").map((id) => parseInt(id, 36)).join(" ") + (run.title ? ", " + run.title : "");
        token.append(letters.slice(at, (at += +length)).join(""));
        parts.push(token);
      }
      parts.push(letters.slice(at).join(""));
      run.tagName ? run.replaceChildren(...parts) : run.replaceWith(...parts);
    }
    placeHits(sequence);
    paint();
  }

  // ---- charts: the value of the bar that is pointed at, touched, or chosen by arrow keys ----

  for (const chart of document.querySelectorAll("figure svg")) {
    const bars = [...chart.querySelectorAll(".bar")];
    const value = chart.parentElement.querySelector(".value");
    // The browser would show the title as well, late and only for a pointer.
    const texts = bars.map((bar) => bar.querySelector("title").textContent);
    for (const bar of bars) bar.replaceChildren();
    let chosen = -1;
    const choose = (number) => {
      bars[chosen]?.classList.remove("chosen");
      chosen = number;
      bars[chosen]?.classList.add("chosen");
      value.textContent = texts[chosen] ?? "";
    };
    const nearest = (x) => {
      const away = bars.map((bar) => bar.getBoundingClientRect()).map((box) => Math.max(box.left - x, x - box.right, 0));
      return away.indexOf(Math.min(...away));
    };
    for (const kind of ["pointerdown", "pointermove"]) chart.addEventListener(kind, (event) => choose(nearest(event.clientX)));
    // A finger that is lifted leaves the value on the page.
    chart.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && choose(-1));
    chart.addEventListener("blur", () => choose(-1));
    chart.addEventListener("keydown", (event) => {
      const to = { ArrowRight: chosen + 1, ArrowLeft: chosen < 0 ? bars.length - 1 : chosen - 1, Home: 0, End: bars.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      choose(Math.min(Math.max(to, 0), bars.length - 1));
    });
  }

  // ---- the table of contents marks the section that is read ----

  const links = [...document.querySelectorAll("nav a")];
  function markSection() {
    const atEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
    const begun = links.filter((link) => document.getElementById(link.hash.slice(1)).getBoundingClientRect().top < 0.3 * innerHeight);
    const here = atEnd ? links.at(-1) : begun.at(-1) ?? links[0];
    for (const link of links) link === here ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
    const nav = here.parentElement;
    if (nav.scrollWidth > nav.clientWidth) nav.scrollLeft = here.offsetLeft - nav.clientWidth / 3;
  }

  // ---- events ----

  addEventListener("pointerover", (event) => {
    const sequence = event.target.closest?.("[data-ids]");
    if (sequence) cutIntoTokens(sequence);
  });
  for (const part of document.querySelectorAll(".choose, .search, .keys")) part.hidden = false;
  choose?.addEventListener("input", arrange);
  text?.addEventListener("input", arrange);
  text?.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    goTo(current + (event.shiftKey ? -1 : 1));
  });
  previous?.addEventListener("click", () => goTo(current - 1));
  next?.addEventListener("click", () => goTo(current + 1));
  addEventListener("hashchange", showLinked);
  // A link to where we are already changes no hash, and following it would take the focus away again.
  addEventListener("click", (event) => {
    if (event.target.closest?.("a")?.getAttribute("href") !== location.hash) return;
    event.preventDefault();
    showLinked();
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.("input, select")) return;
    if (event.key === "j") walk(1);
    if (event.key === "k") walk(-1);
  });
  if (links.length) {
    addEventListener("scroll", markSection, { passive: true });
    markSection();
  }
  showLinked();
})();

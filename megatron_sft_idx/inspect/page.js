// Links open the pack they lead into; j and k walk through the packs, which can be chosen and ordered. Without any of this the page can be read all the same.
(() => {
  const all = [...document.querySelectorAll("details.pack")];
  const [choose, trained, order, text, left] = [".choose", "#trained", "#order", "#text", "#left"].map((name) => document.querySelector(name));
  let packs = all;

  // Those that are asked for, and in them the sequences with a text; in the order of the shard where no other is asked for.
  function arrange() {
    const [by, sign, words] = [order.value.replace("-", ""), order.value.startsWith("-") ? -1 : 1, text.value.toLowerCase()];
    for (const pack of all) {
      const sequences = [...pack.querySelectorAll("li")];
      for (const one of sequences) one.hidden = !one.textContent.toLowerCase().includes(words);
      pack.hidden = (trained.value && pack.dataset.trained !== trained.value) || (words && sequences.every((one) => one.hidden));
    }
    packs = all.filter((pack) => !pack.hidden);
    if (by) packs.sort((one, other) => sign * (one.dataset[by] - other.dataset[by]));
    all.at(0).parentElement.append(...packs);
    left.textContent = packs.length < all.length ? `${packs.length} of the ${all.length} packs on this page` : "";
  }

  function show(pack) {
    if (pack.hidden || text.value) {
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
    show(pack);
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

  // A sequence's text is cut into its tokens when the pointer first comes to it.
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
  }

  addEventListener("pointerover", (event) => {
    const sequence = event.target.closest?.("[data-ids]");
    if (sequence) cutIntoTokens(sequence);
  });
  if (choose) choose.hidden = false;
  choose?.addEventListener("input", arrange);
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
  showLinked();
})();

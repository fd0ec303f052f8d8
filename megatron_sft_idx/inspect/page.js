// Links open the pack they lead into; j and k walk through the packs. Without any of this the page can be read all the same.
(() => {
  const packs = [...document.querySelectorAll("details.pack")];

  function show(pack) {
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

  addEventListener("hashchange", showLinked);
  // A link to where we are already changes no hash, and following it would take the focus away again.
  addEventListener("click", (event) => {
    if (event.target.closest?.("a")?.getAttribute("href") !== location.hash) return;
    event.preventDefault();
    showLinked();
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "j") walk(1);
    if (event.key === "k") walk(-1);
  });
  showLinked();
})();

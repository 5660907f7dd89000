// SPDX-License-Identifier: Apache-2.0
// Fills the menu of versions from a list beside them, so that the pages of an old version know a new one.
addEventListener("DOMContentLoaded", async () => {
  const menu = document.getElementById("versions");
  const root = menu && new URL(menu.dataset.root, location.href);
  if (!menu || location.protocol === "file:") return;
  const list = new URL("../versions.json", root);
  const answer = await fetch(list);
  if (!answer.ok) return;
  for (const name of await answer.json()) {
    const there = new URL(`${encodeURIComponent(name)}/`, list);
    menu.add(new Option(name, there.href, false, there.href === root.href));
  }
  // The same page there; if that version lacks it, its 404 page has the menu.
  menu.addEventListener("change", () => location.assign(new URL(location.href.slice(root.href.length), menu.value)));
  menu.parentElement.hidden = false;
});

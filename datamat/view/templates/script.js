const all = [...document.querySelectorAll("article")], one = (id) => document.getElementById(id);
const asked = new URLSearchParams(location.hash.slice(1));
let page = (parseInt(asked.get("page")) || 1) - 1;
for (const id of ["split", "class", "words", "mask"]) if (asked.has(id) && one(id)) one(id).value = asked.get(id);
function show() {
  const split = one("split").value, kind = one("class").value, words = one("words").value.trim().toLowerCase();
  const found = all.filter((card) => (!split || card.dataset.split === split)
    && (!kind || card.dataset.classes.split(" ").includes(kind))
    && (!words || card.textContent.toLowerCase().includes(words)));
  const pages = Math.max(1, Math.ceil(found.length / {{ per_page }}));
  page = Math.min(Math.max(page, 0), pages - 1);
  all.forEach((card) => { card.hidden = true; });
  found.slice(page * {{ per_page }}, (page + 1) * {{ per_page }}).forEach((card) => { card.hidden = false; });
  one("where").textContent = `${found.length} samples, page ${page + 1} of ${pages}`;
  one("back").disabled = page === 0;
  one("on").disabled = page === pages - 1;
}
for (const id of ["split", "class", "words"]) one(id).addEventListener("input", () => { page = 0; show(); });
one("back").addEventListener("click", () => { page -= 1; show(); scrollTo(0, 0); });
one("on").addEventListener("click", () => { page += 1; show(); scrollTo(0, 0); });
show();

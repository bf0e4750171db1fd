// Filters a list of nodes by the words that the reader types, or by a name that the reader clicks.  Opens the list to which a link
// points.  The script is part of the page, whose content security policy allows it by its hash.  Without it all nodes are shown.
for (const find of document.querySelectorAll(".find")) {
  const box = find.querySelector("input"), counter = find.querySelector("output");
  const rows = [...find.parentElement.querySelectorAll("tbody tr")];
  const texts = rows.map(row => row.textContent.toLowerCase());
  const narrow = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    rows.forEach((row, at) => { left += !(row.hidden = !words.every(word => texts[at].includes(word))); });
    find.parentElement.classList.toggle("some", words.length > 0);
    counter.textContent = words.length ? left + " of " + rows.length : "";
  };
  find.hidden = false;
  box.addEventListener("input", narrow);
  find.parentElement.addEventListener("click", event => {
    if (event.target.tagName === "I") { box.value = event.target.textContent; narrow(); }
  });
}
const open = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") target.open = true;
};
addEventListener("hashchange", open);
open();

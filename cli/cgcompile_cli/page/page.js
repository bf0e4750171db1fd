// Narrows a list of nodes to those that hold what is typed, or the name that is clicked, and opens the list that a link leads to.
// It stands in the page, which allows it by its hash alone; without it everything is there, only unnarrowed.
for (const find of document.querySelectorAll(".find")) {
  const box = find.querySelector("input"), told = find.querySelector("output");
  const rows = [...find.parentElement.querySelectorAll("tbody tr")];
  const texts = rows.map(row => row.textContent.toLowerCase());
  const narrow = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    rows.forEach((row, at) => { left += !(row.hidden = !words.every(word => texts[at].includes(word))); });
    find.parentElement.classList.toggle("some", words.length > 0);
    told.textContent = words.length ? left + " of " + rows.length : "";
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

document.querySelectorAll("table.sortable").forEach(function (table) {
  table.querySelectorAll("thead th").forEach(function (th, column) {
    var button = th.querySelector("button");
    if (!button) return;
    button.addEventListener("click", function () {
      var up = th.getAttribute("aria-sort") !== "ascending";
      var body = table.tBodies[0];
      var key = function (row) {
        var cell = row.cells[column], given = cell.dataset.sort;
        return given === undefined ? cell.textContent.trim() : given;
      };
      var rows = Array.from(body.rows).sort(function (a, b) {
        var x = key(a), y = key(b);
        if (x === "" || y === "") return (x === "") - (y === "");
        var order = isNaN(x) || isNaN(y) ? x.localeCompare(y, "en", { numeric: true }) : x - y;
        return up ? order : -order;
      });
      table.querySelectorAll("th[aria-sort]").forEach(function (other) { other.removeAttribute("aria-sort"); });
      th.setAttribute("aria-sort", up ? "ascending" : "descending");
      rows.forEach(function (row) { row.classList.remove("start"); body.appendChild(row); });
    });
  });
});
function unfold() {
  var target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (var node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  if (target) target.scrollIntoView();
}
window.addEventListener("hashchange", unfold);
if (location.hash) unfold();
window.addEventListener("beforeprint", function () {
  document.querySelectorAll("details").forEach(function (d) { d.open = true; });
});

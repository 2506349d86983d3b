// What Material leaves out for keyboards and screen readers: names for the search and for the copy buttons'
// groups, and tables that scroll are reachable.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((box) => box.setAttribute("tabindex", "0"));
  document.querySelectorAll(".md-code__nav").forEach((nav, number) => nav.setAttribute("aria-label", `Code block ${number + 1}`));
});

/* The theme, set before anything is drawn: a page that turns dark a moment later would flash. */
try {
  document.documentElement.dataset.theme = localStorage.getItem("infer.theme") ?? "system";
} catch { // a browser may forbid storage: then the system decides
}

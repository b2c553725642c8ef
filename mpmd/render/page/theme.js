// Light and dark: the system's choice, until the button has another. Prints are light.

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  state.dark = dark;
  readTheme();
  redraw();
}

function listenToTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const print = matchMedia("print");
  const toggle = byId("dark");
  let chosen = null;
  const apply = () => {
    const dark = chosen ?? system.matches;
    toggle.setAttribute("aria-pressed", dark);
    setTheme(dark && !print.matches);
  };
  toggle.addEventListener("click", () => {
    chosen = !(chosen ?? system.matches);
    apply();
  });
  system.addEventListener("change", apply);
  const printing = () => {
    apply();
    drawers.forEach((draw) => draw()); // a print does not wait for a frame
  };
  print.addEventListener("change", printing);
  addEventListener("beforeprint", printing);
  apply();
}

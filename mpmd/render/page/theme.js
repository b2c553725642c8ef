// Light and dark: the system's choice, until the button has another. Prints are light.

function listenToTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const print = matchMedia("print");
  const toggle = byId("dark");
  let chosen = null;
  const apply = () => {
    const dark = chosen ?? system.matches;
    toggle.setAttribute("aria-pressed", dark);
    state.dark = dark && !print.matches;
    document.documentElement.dataset.theme = state.dark ? "dark" : "light";
    readTheme();
    redraw();
  };
  toggle.addEventListener("click", () => {
    chosen = !(chosen ?? system.matches);
    apply();
  });
  system.addEventListener("change", apply);
  const printing = () => {
    apply();
    draw(); // a print does not wait for a frame
  };
  print.addEventListener("change", printing);
  addEventListener("beforeprint", printing);
  apply();
}

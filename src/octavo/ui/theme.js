// Light or dark: the system's choice until the reader makes another. Runs before the page is painted.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const store = {
    get() { try { return localStorage.getItem("octavo-theme"); } catch { return null; } },
    set(value) {
      try {
        if (value === null) localStorage.removeItem("octavo-theme");
        else localStorage.setItem("octavo-theme", value);
      } catch { /* a browser without storage forgets the choice */ }
    },
  };
  let chosen = store.get();

  function isDark() { return chosen === null ? system.matches : chosen === "dark"; }

  function apply() {
    if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
    else delete root.dataset.theme;
    document.getElementById("theme")?.setAttribute("aria-pressed", String(isDark()));
  }

  apply();
  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      const wanted = isDark() ? "light" : "dark";
      // Back at the system's choice means following it again.
      chosen = (wanted === "dark") === system.matches ? null : wanted;
      store.set(chosen);
      apply();
    });
  });
})();

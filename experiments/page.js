"use strict";
// Runs in the head, so that a remembered choice is there before the first paint.
(() => {
  const root = document.documentElement;
  const stored = () => { try { return localStorage.getItem("foliax-theme"); } catch { return null; } };
  const store = (theme) => { try { localStorage.setItem("foliax-theme", theme); } catch { /* private window */ } };
  if (stored()) root.dataset.theme = stored();
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const dark = root.dataset.theme
        ? root.dataset.theme === "dark"
        : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      store(root.dataset.theme);
    });
  });
})();

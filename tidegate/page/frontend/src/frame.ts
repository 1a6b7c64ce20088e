/** The page inside Airflow's frame: its theme, and links that lead out of it. */
import { useEffect, useState } from "preact/hooks";
import { chosenZone, setZone } from "./zone";

/** Airflow's document around ours, if it is one that we may touch. */
function outerDocument(): Document | null {
  if (window.parent === window) return null;
  try {
    return window.parent.document;
  } catch {
    return null; // a frame of another site
  }
}

export const isFramed = (): boolean => window.parent !== window;

/**
 * Open an address outside the frame. Airflow's frame may neither navigate the window nor open another, so the click happens
 * in the outer document.
 */
export function openOutside(address: string): void {
  const owner = outerDocument() ?? document;
  const link = owner.createElement("a");
  link.href = address;
  owner.body.append(link);
  link.click();
  link.remove();
}

/** Follow the theme that is chosen in Airflow: of the frame around, or stored by its UI for this site; else the system's. */
export function useTheme(): void {
  useEffect(() => {
    const outer = outerDocument()?.documentElement ?? null;
    const apply = () => {
      const chosen = outer ? themeOf(outer) : localStorage.getItem("theme");
      if (chosen === "dark" || chosen === "light") document.documentElement.dataset["theme"] = chosen;
      else delete document.documentElement.dataset["theme"];
    };
    apply();
    addEventListener("storage", apply);
    const watcher = new MutationObserver(apply);
    if (outer) watcher.observe(outer, { attributes: true, attributeFilter: ["class"] });
    return () => {
      removeEventListener("storage", apply);
      watcher.disconnect();
    };
  }, []);
}

/** Follow the time zone that is chosen in Airflow; another one draws everything again. */
export function useZone(): string | null {
  const [zone, choose] = useState(() => chosenZone(localStorage.getItem("timezone")));
  setZone(zone);
  useEffect(() => {
    const follow = () => choose(chosenZone(localStorage.getItem("timezone")));
    addEventListener("storage", follow);
    return () => removeEventListener("storage", follow);
  }, []);
  return zone;
}

const themeOf = (root: HTMLElement): string | undefined => ["dark", "light"].find((name) => root.classList.contains(name));

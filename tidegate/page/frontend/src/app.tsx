/** The page's shell: header, routes, connection, and the region that speaks. */
import { useEffect, useRef } from "preact/hooks";
import { ActionsProvider } from "./actions";
import { useAnnouncement } from "./announce";
import { isFramed, useTheme, useZone } from "./frame";
import { useLive } from "./live";
import { ConnectionBar } from "./parts/connection_bar";
import { Guarded } from "./parts/answer";
import { Empty, Outward } from "./parts/basics";
import { useRoute, type Route } from "./route";
import type { Me } from "./server_types";
import { BatchView } from "./views/batch";
import { Overview } from "./views/overview";
import { PipelineView } from "./views/pipeline";

export function App() {
  useTheme();
  const zone = useZone();
  const route = useRoute();
  const { data: me } = useLive<Me>("api/me", Infinity);
  const spoken = useAnnouncement();
  const main = useRef<HTMLElement>(null);
  const place = route.parts.join("/");
  const isFirst = useRef(true);
  useEffect(() => {
    document.title = [...[...route.parts.slice(1)].reverse(), "Tidegate"].join(" \u00b7 ");
    if (!isFirst.current) {
      // A tab of the same pipeline keeps the focus on the tab that was chosen.
      if (!document.activeElement?.closest(".tabs")) main.current?.querySelector("h1")?.focus({ preventScroll: true });
      if (!document.activeElement?.closest(".tabs")) scrollTo(0, 0);
    }
    isFirst.current = false;
  }, [place]);
  const header = useRef<HTMLElement>(null);
  useEffect(() => {
    const root = document.documentElement;
    const keep = new ResizeObserver(() => root.style.setProperty("--header", `${header.current?.offsetHeight ?? 0}px`));
    if (header.current) keep.observe(header.current);
    return () => keep.disconnect();
  }, []);
  const skip = (event: Event) => {
    event.preventDefault(); // the hash is the route
    main.current?.focus();
  };
  return (
    <ActionsProvider>
      <a class="skip-link" href="#main" onClick={skip}>
        Skip to the content
      </a>
      <header class="top" ref={header}>
        <a class="brand" href="#/">
          <svg viewBox="0 0 24 24" aria-hidden="true">
            <path d="M6 19V9M12 19V5M18 19V9" class="gate" />
            <path
              d="M3.500 14.500c1.400-1.600 2.800-1.600 4.200 0s2.900 1.600 4.300 0 2.900-1.600 4.300 0 2.800 1.600 4.200 0"
              class="tide"
            />
          </svg>
          Tidegate
        </a>
        <ConnectionBar />
        {me && (
          <nav class="outer" aria-label="Airflow">
            <span class="user" title="the user who is logged in to Airflow">
              {me.user}
            </span>
            {isFramed() ? <Outward to={`.${location.hash}`}>full page</Outward> : <Outward to="../">Airflow</Outward>}
          </nav>
        )}
      </header>
      <main id="main" ref={main} tabIndex={-1}>
        <Guarded key={zone} what="this view" subject={place}>
          <View route={route} />
        </Guarded>
      </main>
      <footer>
        {me && `Tidegate ${me.version}. `}The same on the command line: <code>tidegate status</code>, <code>tidegate why</code>.
      </footer>
      <div class="spoken" role="status" aria-live="polite">
        {spoken}
      </div>
    </ActionsProvider>
  );
}

function View({ route: { parts, query } }: { route: Route }) {
  const [first, name, section, item] = parts;
  if (first === undefined) return <Overview search={query.get("search") ?? ""} />;
  if (first === "pipelines" && name !== undefined) {
    if (section === "batches" && item !== undefined) return <BatchView key={`${name} ${item}`} name={name} txid={item} />;
    return <PipelineView key={name} name={name} section={section} item={item} query={query} />;
  }
  return (
    <>
      <h1 tabIndex={-1}>Nothing is here</h1>
      <Empty title="This address names no view of the page.">
        <p>
          <a href="#/">All pipelines</a>
        </p>
      </Empty>
    </>
  );
}

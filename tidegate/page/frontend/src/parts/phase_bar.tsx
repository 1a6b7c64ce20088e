/** Uncommitted batches by phase: a small bar, and the same in words. */
import { count } from "../format";
import type { Phase } from "../types";

const ORDER: Phase[] = ["halted", "failed", "processed", "processing", "planned"];

export function PhaseBar({ phases }: { phases: Partial<Record<Phase, number>> }) {
  const present = ORDER.filter((phase) => phases[phase]);
  if (!present.length) return <span class="none">none</span>;
  return (
    <span class="phases">
      <span class="phase-bar" aria-hidden="true">
        {present.map((phase) => (
          <span key={phase} class={`fill-${phase}`} style={{ flexGrow: phases[phase] }} />
        ))}
      </span>
      <span class="phase-words">{present.map((phase) => `${count(phases[phase])} ${phase}`).join(", ")}</span>
    </span>
  );
}

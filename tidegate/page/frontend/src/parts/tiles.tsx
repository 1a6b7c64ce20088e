/** Figures that are seen at a glance. */
import type { JSX } from "preact";

export type Tile = { name: string; value: JSX.Element | string; below: JSX.Element | string };

export function Tiles({ tiles }: { tiles: Tile[] }) {
  return (
    <dl class="tiles">
      {tiles.map((tile) => (
        <div key={tile.name}>
          <dt>{tile.name}</dt>
          <dd>
            <span class="value">{tile.value}</span>
            <span class="below">{tile.below}</span>
          </dd>
        </div>
      ))}
    </dl>
  );
}

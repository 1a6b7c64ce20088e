/** Tables with a caption; on a narrow screen each row becomes a card with the columns' names. */
import type { ComponentChildren, JSX } from "preact";

export type TableColumn<Row> = {
  name: string;
  cell: (row: Row) => JSX.Element | string | number | null;
  number?: boolean; // right-aligned
  wide?: boolean; // takes the space that is left, and a card's whole width
  whole?: boolean; // takes a card's whole width
};

type Properties<Row> = {
  caption: ComponentChildren;
  hideCaption?: boolean;
  columns: TableColumn<Row>[];
  rows: Row[];
  id: (row: Row) => string | number;
  rowClass?: (row: Row) => string;
};

/** The first column names the row. The roles are explicit because cards lose those of their elements. */
export function Table<Row>({ caption, hideCaption = false, columns, rows, id, rowClass }: Properties<Row>) {
  return (
    <table class="table" role="table">
      <caption class={hideCaption ? "spoken" : ""}>{caption}</caption>
      <thead role="rowgroup">
        <tr role="row">
          {columns.map((column) => (
            <th key={column.name} role="columnheader" scope="col" class={classes(column)}>
              {column.name}
            </th>
          ))}
        </tr>
      </thead>
      <tbody role="rowgroup">
        {rows.map((row) => (
          <tr key={id(row)} role="row" class={rowClass?.(row) ?? ""}>
            {columns.map((column, position) =>
              position === 0 ? (
                <th key={column.name} role="rowheader" scope="row" class={classes(column)}>
                  {column.cell(row)}
                </th>
              ) : (
                <td key={column.name} role="cell" class={classes(column)} data-label={column.name}>
                  {column.cell(row)}
                </td>
              ),
            )}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

const classes = (column: { number?: boolean; wide?: boolean; whole?: boolean }): string =>
  [column.number && "number", column.wide && "wide", column.whole && "whole"].filter(Boolean).join(" ");

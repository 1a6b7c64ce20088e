/** What operators did by hand. */
import { Ago } from "../parts/basics";
import { Table } from "../parts/table";
import { batchHref } from "../route";
import type { Action } from "../server_types";

export function AuditTrail({ pipeline, actions, caption }: { pipeline: string; actions: Action[]; caption: string }) {
  return (
    <Table
      caption={caption}
      rows={actions}
      id={(action) => `${action.acted_at} ${action.action} ${action.txid}`}
      columns={[
        { name: "action", cell: (action) => <strong>{action.action}</strong> },
        {
          name: "txid",
          number: true,
          cell: (action) => (action.txid === null ? "all" : <a href={batchHref(pipeline, action.txid)}>{action.txid}</a>),
        },
        { name: "reason", wide: true, cell: (action) => <bdi>{action.reason ?? ""}</bdi> },
        { name: "by", cell: (action) => <bdi>{action.owner}</bdi> },
        { name: "when", cell: (action) => <Ago at={action.acted_at} /> },
      ]}
    />
  );
}

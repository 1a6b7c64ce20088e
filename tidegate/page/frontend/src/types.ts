/** Names for parts of what the server answers. */
import type { BatchRow, Button, Cause } from "./server_types";

export type Phase = BatchRow["phase"];
export type Severity = Cause["severity"];
export type Verb = Button["verb"] | "redo";

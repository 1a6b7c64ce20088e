import { render } from "preact";
import { App } from "./app";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/forms.css";
import "./styles/parts.css";
import "./styles/figures.css";
import "./styles/navigation.css";
import "./styles/tables.css";
import "./styles/dialogs.css";
import "./styles/timeline.css";
import "./styles/narrow.css";

render(<App />, document.getElementById("page")!);

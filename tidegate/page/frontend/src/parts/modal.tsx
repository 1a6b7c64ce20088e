/** A modal dialog: it holds the focus, and gives it back when it closes. */
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";

type Properties = { title: string; close: () => void; isBusy?: boolean; isDone?: boolean; children: ComponentChildren };

export function Modal({ title, close, isBusy = false, isDone = false, children }: Properties) {
  const dialog = useRef<HTMLDialogElement>(null);
  const done = useRef(isDone);
  done.current = isDone;
  useEffect(() => {
    const before = document.activeElement;
    dialog.current?.showModal();
    return () => {
      // What opened the dialog may be gone, or go soon, since the action has helped.
      if (!done.current && before instanceof HTMLElement && before.isConnected) before.focus();
      else document.querySelector<HTMLElement>("h1")?.focus();
    };
  }, []);
  return (
    <dialog
      ref={dialog}
      aria-labelledby="dialog-title"
      onCancel={(event) => {
        event.preventDefault();
        if (!isBusy) close();
      }}
      onClose={() => (isBusy ? dialog.current?.showModal() : close())} // a browser obeys Escape pressed again, whatever is said
    >
      <h2 id="dialog-title" tabIndex={-1} autofocus>
        {title}
      </h2>
      {children}
    </dialog>
  );
}

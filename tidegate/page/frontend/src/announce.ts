/** What screen readers are told about changes: rarely, and only what matters. */
import { useEffect, useRef, useState } from "preact/hooks";

const QUIET_MS = 1500; // several changes at once are one announcement
let pending: string[] = [];
let timer: number | undefined;
let speak: (text: string) => void = () => {};

/** Say this, once, politely. */
export function announce(text: string): void {
  if (!pending.includes(text)) pending.push(text);
  clearTimeout(timer);
  timer = setTimeout(() => {
    speak(pending.slice(-3).join(" "));
    pending = [];
  }, QUIET_MS);
}

/** The text for the page's one live region. */
export function useAnnouncement(): string {
  const [text, setText] = useState("");
  useEffect(() => {
    speak = setText;
  }, []);
  return text;
}

/** Announce a text when it changes, but not the first one, nor that of another subject. */
export function useAnnounced(subject: string, text: string | null): void {
  const last = useRef<{ subject: string; text: string } | null>(null);
  useEffect(() => {
    if (text === null) return;
    if (last.current?.subject === subject && last.current.text !== text) announce(text);
    last.current = { subject, text };
  }, [subject, text]);
}

/** What the page says of times, waits and pipelines. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { absolute, ago, between, duration } from "../src/format";
import { batchHref, href, parse } from "../src/route";
import type { PipelineRow, TimelineBatch } from "../src/server_types";
import { overall, story } from "../src/timeline/describe";
import { timeScale } from "../src/timeline/scale";
import { summary } from "../src/verdict";
import { chosenZone, fromWall, local, setZone, ticks } from "../src/zone";

const DAY = 86_400_000;

test("times are in the zone that is chosen in Airflow", () => {
  assert.deepEqual(['"Asia/Tokyo"', '"UTC"', '"Nowhere/Land"', "Asia/Tokyo", "7", "", null].map(chosenZone), [
    "Asia/Tokyo",
    "UTC",
    null,
    null,
    null,
    null,
    null,
  ]);
  setZone("Asia/Tokyo");
  assert.equal(local("2026-11-25T12:00:00Z"), "2026-11-25 21:00:00");
  assert.equal(absolute("2026-11-25T12:00:00Z"), "2026-11-25 21:00:00 GMT+9 (2026-11-25 12:00:00 UTC)");
  assert.equal(fromWall(Date.parse("2026-11-25T21:00Z")), Date.parse("2026-11-25T12:00Z"));
  setZone("UTC");
  assert.equal(absolute("2026-11-25T12:00:00Z"), "2026-11-25 12:00:00 UTC");
});

test("what is no time is a dash, and ends no view", () => {
  for (const wrong of [undefined, null, "", "never", Number.NaN, 1e300]) assert.equal(local(wrong), "\u2013");
  assert.equal(absolute("never"), "\u2013");
  assert.equal(duration(between("never", "2026-11-25T12:00:00Z")), "\u2013");
  assert.equal(ago(59.9), "59 s ago");
});

for (const [zone, first, last] of [
  ["Europe/Berlin", "2026-10-22", "2026-10-29"], // summer time ends
  ["Europe/Berlin", "2026-03-26", "2026-04-02"], // and begins
  ["America/New_York", "2026-10-29", "2026-11-05"],
  ["Australia/Lord_Howe", "2026-04-02", "2026-04-09"], // by half an hour
  ["America/Santiago", "2026-09-03", "2026-09-10"], // at midnight, which is left out
  ["UTC", "2026-10-22", "2026-10-29"],
] as const)
  test(`each day of the week from ${first} has one tick in ${zone}, at its beginning`, () => {
    setZone(zone);
    const [from, to] = [fromWall(Date.parse(`${first}T08:00Z`)), fromWall(Date.parse(`${last}T08:00Z`))];
    const shown = ticks(from, to, DAY).map((time) => local(time));
    assert.deepEqual(
      shown.map((each) => each.slice(0, 10)),
      Array.from({ length: 7 }, (_, day) => new Date(Date.parse(first) + (day + 1) * DAY).toISOString().slice(0, 10)),
    );
    for (const each of shown) assert.match(each, / 0[01]:00:00$/);
    const hours = ticks(from, to, DAY / 24);
    assert.deepEqual([hours.length, new Set(hours).size], [Math.floor((to - from) / (DAY / 24)) + 1, hours.length]);
    setZone("UTC");
  });

const row = (name: string, severity: PipelineRow["why"]["severity"], isPaused = false) =>
  ({ name, why: { severity }, lag_seconds: null, paused: isPaused ? { at: "", by: "", reason: "" } : null }) as PipelineRow;
const rows = (number: number, severity: PipelineRow["why"]["severity"]) =>
  Array.from({ length: number }, (_, index) => row(`p${index}`, severity));

test("all pipelines flow only if all were looked at", () => {
  assert.equal(summary(450, rows(200, "ok"))?.text, "All 450 pipelines flow.");
  assert.equal(
    summary(450, rows(200, "info"))?.text,
    "Of 450 pipelines, the 200 with most trouble: none needs a person or waits.",
  );
  assert.equal(
    summary(450, rows(200, "error"))?.text,
    "Of 450 pipelines, the 200 with most trouble: 200 pipelines need a person.",
  );
  assert.equal(summary(2, rows(2, "info"))?.text, "All 2 pipelines flow.");
  assert.equal(
    summary(3, [row("a", "warning"), row("b", "warning", true), row("c", "ok")])?.text,
    "1 pipeline waits, 1 pipeline is paused.",
  );
  assert.equal(summary(2, rows(2, "ok"), "fl")?.text, "With \u201cfl\u201d in the name: all 2 pipelines flow.");
  assert.equal(summary(0, []), null);
});

const batch: TimelineBatch = {
  txid: 8,
  phase: "processed",
  opened_at: "2026-11-25T11:59:00Z",
  attempts: [
    {
      attempt: 1,
      started_at: "2026-11-25T11:59:10Z",
      staged_at: null,
      sealed_at: "2026-11-25T11:59:14Z",
      failed_at: null,
      seen_at: null,
      error: null,
      owner: "a run",
    },
  ],
  commit: null,
};

test("a wait goes on by the clock, whatever the time of the answer", () => {
  const timeline = { now: "2026-11-25T12:00:00Z", cursor: 7, batches: [batch] };
  const later = Date.parse("2026-11-25T13:59:14Z");
  assert.match(story(batch, later), /waits for its turn for 2 h$/);
  assert.match(overall(timeline, later), /The longest wait for a turn is 2 h\.$/);
});

test("idle time is cut, and times stay in order", () => {
  const scale = timeScale(
    [
      [0, 10_000],
      [DAY, DAY + 10_000],
    ],
    600,
    false,
  );
  const places = [0, 5000, 10_000, DAY / 2, DAY, DAY + 10_000].map(scale.x);
  assert.equal(scale.cuts.length, 1);
  assert.deepEqual(
    places,
    [...places].sort((a, b) => a - b),
  );
  assert.equal(
    timeScale(
      [
        [0, 10_000],
        [DAY, DAY + 10_000],
      ],
      600,
      true,
    ).cuts.length,
    0,
  );
});

test("names of any kind survive an address", () => {
  assert.deepEqual(parse(href(["pipelines", "a/b?c#d%"], { txid: 7, error: null })).parts, ["pipelines", "a/b?c#d%"]);
  assert.equal(parse(batchHref("a", 7)).parts[3], "7");
  assert.deepEqual(parse("#/pipelines/%zz").parts, ["pipelines", "%zz"]);
});

/** Answers that are followed: what is old is never shown as new. Only the network and the clock are made up. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { connection, pause, paused, refreshAll, Resource, resume, serverNow, type Heard } from "../src/polling";

type Answer = { status: number; body?: unknown; etag?: string; cut?: boolean };
type Asked = {
  where: string;
  etag: string | null;
  answer: (answer: Answer | "nothing") => Promise<void>;
  aborted: () => boolean;
};

const NOW = Date.parse("2026-11-25T12:00:00Z");
let asked: Asked[] = [];
const settle = async () => {
  for (let turn = 0; turn < 20; turn++) await Promise.resolve();
};

function network(): void {
  asked = [];
  const browser = { hidden: false, baseURI: "http://here/tidegate/" };
  Object.assign(globalThis, { document: browser, fetch: ask });
}
const hide = (hidden: boolean) => Object.assign(globalThis.document, { hidden });

function ask(where: string, { headers, signal }: { headers: Record<string, string>; signal: AbortSignal }): Promise<unknown> {
  return new Promise((resolve, reject) => {
    signal.addEventListener("abort", () => reject(new Error("aborted")));
    asked.push({
      where: where.replace("http://here/tidegate/", ""),
      etag: headers["If-None-Match"] ?? null,
      aborted: () => signal.aborted,
      answer: async (answer) => {
        if (answer === "nothing") reject(new TypeError("network"));
        else resolve(responseOf(answer));
        await settle();
      },
    });
  });
}

const responseOf = ({ status, body, etag, cut }: Answer) => ({
  status,
  ok: status < 300,
  type: "basic",
  statusText: "",
  headers: { get: () => etag ?? null },
  text: () =>
    cut ? Promise.reject(new TypeError("cut off")) : Promise.resolve(body === undefined ? "" : JSON.stringify(body)),
});

function follow<T>(where: string, everyMs = 2000): { heard: () => Heard<T>; resource: Resource<T>; told: Heard<T>[] } {
  const told: Heard<T>[] = [];
  const resource = new Resource<T>(where, everyMs, (heard) => told.push(heard));
  return { heard: () => told.at(-1)!, resource, told };
}
const last = () => asked.at(-1)!;

for (const status of [403, 404, 409, 410, 422, 500, 503])
  test(`a ${status} after a success stands beside what was heard, and when`, async ({ mock }) => {
    network();
    mock.timers.enable({ apis: ["setTimeout", "Date"], now: NOW });
    const { heard, resource } = follow<{ rows: number }>("api/a");
    await last().answer({ status: 200, body: { rows: 7 } });
    mock.timers.tick(2000);
    await last().answer({ status, body: { code: "A_CODE", message: "It is refused." } });
    assert.deepEqual([heard().data, heard().heard, heard().error?.status], [{ rows: 7 }, NOW, status]);
    assert.deepEqual([resource.isStale(), connection().isStale, connection().heard], [true, true, NOW]);
    mock.timers.tick(4000);
    await last().answer({ status: 304 });
    assert.deepEqual([heard().error, heard().heard, connection().isStale], [null, NOW + 6000, false]);
    resource.end();
  });

test("a route that fails hides behind no other, and is no failure of all", async ({ mock }) => {
  network();
  mock.timers.enable({ apis: ["setTimeout", "Date"], now: NOW });
  const [one, other] = [follow("api/one"), follow("api/other")];
  await asked[0]!.answer({ status: 503, body: { code: "STORE_UNAVAILABLE", message: "away" } });
  await asked[1]!.answer({ status: 200, body: {} });
  assert.deepEqual([connection().isStale, connection().failure], [true, null]);
  assert.deepEqual([one.heard().error?.code, other.heard().error], ["STORE_UNAVAILABLE", null]);
  mock.timers.tick(2000);
  await last().answer("nothing");
  assert.equal(connection().failure?.status, 503);
  one.resource.end();
  other.resource.end();
});

test("an answer that is asked for once is not old, and hides no failure of all", async ({ mock }) => {
  network();
  mock.timers.enable({ apis: ["setTimeout", "Date"], now: NOW });
  const [me, other] = [follow("api/me", Infinity), follow("api/other")];
  await asked[0]!.answer({ status: 200, body: { user: "admin" } });
  await asked[1]!.answer("nothing");
  assert.equal(connection().failure?.code, "NO_ANSWER");
  mock.timers.tick(4000);
  assert.equal(asked.length, 3);
  await last().answer({ status: 200, body: {} });
  assert.equal(last().where, "api/me", "who is logged in may be another user now");
  await last().answer({ status: 200, body: { user: "viewer" } });
  mock.timers.tick(3_600_000);
  assert.equal(me.resource.isStale(), false);
  const before = asked.length;
  resume();
  const names = asked.slice(before).map((one) => one.where);
  assert.equal(names.includes("api/me"), true, "another user may have logged in meanwhile");
  me.resource.end();
  other.resource.end();
});

test("a refresh after an action is not lost to a poll that began before it", async ({ mock }) => {
  network();
  mock.timers.enable({ apis: ["setTimeout", "Date"], now: NOW });
  const { told, heard, resource } = follow<string>("api/a");
  const before = last();
  refreshAll();
  assert.deepEqual([asked.length, before.aborted()], [2, true]);
  await before.answer({ status: 200, body: "before the action" });
  assert.equal(told.length, 0);
  await last().answer({ status: 200, body: "after the action" });
  assert.equal(heard().data, "after the action");
  resource.end();
});

test("an answer that is cut off, empty, or no JSON, is an error, and asked for again", async ({ mock }) => {
  network();
  mock.timers.enable({ apis: ["setTimeout", "Date"], now: NOW });
  const { heard, resource } = follow("api/a");
  await last().answer({ status: 200, cut: true });
  assert.equal(heard().error?.code, "NO_ANSWER");
  mock.timers.tick(4000);
  await last().answer({ status: 200, body: { rows: 7 } });
  for (const body of [undefined, null]) {
    mock.timers.tick(8000);
    await last().answer({ status: 200, body });
    assert.deepEqual([heard().error?.code, heard().data], ["NOT_JSON", { rows: 7 }]);
  }
  assert.equal(asked.length, 4);
  resource.end();
});

test("a page that is hidden, or stands still, asks for nothing, and goes on at once", async ({ mock }) => {
  network();
  mock.timers.enable({ apis: ["setTimeout", "Date"], now: NOW });
  const { resource } = follow("api/a");
  await last().answer({ status: 200, body: {}, etag: "1" });
  hide(true);
  mock.timers.tick(3_600_000);
  assert.equal(asked.length, 1);
  hide(false);
  assert.equal(resource.isStale(), true, "an hour old, until the answer is here");
  resume();
  assert.deepEqual([asked.length, last().etag], [2, "1"]);
  await last().answer({ status: 304 });
  assert.equal(resource.isStale(), false);
  pause(true);
  mock.timers.tick(3_600_000);
  resume();
  assert.deepEqual([asked.length, paused()], [2, true]);
  pause(false);
  assert.equal(asked.length, 3);
  resource.end();
});

test("a slow server is asked less often, and is not called away for it", async ({ mock }) => {
  network();
  mock.timers.enable({ apis: ["setTimeout", "Date"], now: NOW });
  const { resource } = follow("api/a");
  mock.timers.tick(3000);
  await last().answer({ status: 200, body: {} });
  mock.timers.tick(23_999);
  assert.deepEqual([asked.length, resource.isStale()], [1, false]);
  mock.timers.tick(1);
  assert.deepEqual([asked.length, resource.isStale()], [2, false]);
  mock.timers.tick(10_000);
  assert.equal(resource.isStale(), true);
  resource.end();
});

test("the clock is the server's, also while its answers do not change", async ({ mock }) => {
  network();
  mock.timers.enable({ apis: ["setTimeout", "Date"], now: NOW });
  const { resource } = follow("api/a");
  await last().answer({ status: 200, body: { now: "2026-11-25T14:00:00Z" } });
  mock.timers.tick(2000);
  await last().answer({ status: 304 });
  assert.equal(serverNow(), Date.parse("2026-11-25T14:00:02Z"));
  resource.end();
});

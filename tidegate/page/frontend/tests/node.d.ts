/** What the tests use of Node, whose own types would change those of the browser. */
declare module "node:test" {
  type Test = { mock: { timers: { enable(options: { apis: string[]; now?: number }): void; tick(ms: number): void } } };
  export function test(name: string, run: (test: Test) => void | Promise<void>): void;
}
declare module "node:assert/strict" {
  const assert: {
    equal(found: unknown, expected: unknown, message?: string): void;
    deepEqual(found: unknown, expected: unknown, message?: string): void;
    match(found: string, expected: RegExp): void;
  };
  export default assert;
}

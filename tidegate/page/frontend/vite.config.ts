import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { join, relative } from "node:path";
import { defineConfig, type Plugin } from "vite";

const HERE = import.meta.dirname;
const OTHER_INPUTS = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts"];

/** SHA-256 over the names and contents of everything that the build reads, by name. tests/page/test_built_files.py repeats it. */
function digestOfSources(): string {
  const sources = readdirSync(join(HERE, "src"), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(HERE, join(entry.parentPath, entry.name)));
  const digest = createHash("sha256");
  for (const name of [...OTHER_INPUTS, ...sources].sort()) {
    digest
      .update(`${name}\0`)
      .update(readFileSync(join(HERE, name)))
      .update("\0");
  }
  return digest.digest("hex");
}

/** Writes beside the built files from which sources they were built. */
const sourcesDigest: Plugin = {
  name: "sources-digest",
  generateBundle() {
    this.emitFile({ type: "asset", fileName: "sources.sha256", source: `${digestOfSources()}\n` });
  },
};

export default defineConfig({
  base: "./", // Airflow may be served below any path
  build: {
    outDir: "../static",
    emptyOutDir: true,
    target: ["chrome123", "firefox130", "safari17.5"],
    assetsInlineLimit: 0,
    modulePreload: false,
  },
  plugins: [sourcesDigest],
});

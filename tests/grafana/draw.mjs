// node draw.mjs JOBS.json: a list of {drawing, report, picture, scale, height}. Draws each drawing in headless Chromium, without a
// server: the page's own address is answered here, and a request to anywhere else is refused and reported.
// Without a height the picture is as high as the dashboard.
import { readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';
import { chromium } from 'playwright-core';

const WIDTH = 1624;
const ORIGIN = 'http://dashboards.test/';
const here = dirname(fileURLToPath(import.meta.url));
const modules = join(here, 'node_modules');

// What a Grafana server has under /public: icons, and the two fonts.
function asset(url) {
  const path = url.startsWith(`${ORIGIN}public/`) ? url.slice(`${ORIGIN}public/`.length) : '';
  const icon = path.match(/^build\/(img\/icons\/[\w/-]+\.svg)$/);
  if (icon) return join(modules, '@grafana/ui/dist/public', icon[1]);
  const inter = path.match(/^fonts\/inter\/Inter-(Regular|Medium)\.woff2$/);
  if (inter) return join(modules, `@fontsource/inter/files/inter-latin-${inter[1] === 'Medium' ? 500 : 400}-normal.woff2`);
  if (path.startsWith('fonts/roboto/')) return join(modules, '@fontsource/roboto-mono/files/roboto-mono-latin-400-normal.woff2');
  return undefined;
}

const { outputFiles } = await build({
  entryPoints: [join(here, 'web/app.tsx')], outdir: join(here, 'build'), bundle: true, write: false, minify: true, format: 'iife', jsx: 'automatic',
  define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
  loader: { '.svg': 'dataurl', '.woff2': 'dataurl', '.woff': 'dataurl', '.ttf': 'dataurl' }, logLevel: 'error',
});
const script = outputFiles.find((file) => file.path.endsWith('.js')).text;
const style = outputFiles.find((file) => file.path.endsWith('.css'))?.text ?? '';
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu', '--disable-background-networking'] });
try {
  for (const { drawing, report, picture, scale, height } of JSON.parse(readFileSync(process.argv[2], 'utf8'))) {
    const page = await browser.newPage({ viewport: { width: WIDTH, height: 900 }, deviceScaleFactor: scale, timezoneId: 'UTC', locale: 'en-US' });
    const complaints = [];
    page.on('pageerror', (error) => complaints.push(String(error.stack ?? error)));
    page.on('console', (message) => { if (message.type() === 'error') complaints.push(message.text()); });
    await page.route('**', (route) => {
      const url = route.request().url();
      if (url === ORIGIN) return route.fulfill({ contentType: 'text/html', body: '<!doctype html><body><div id="root"></div></body>' });
      const file = asset(url);
      if (file) return route.fulfill({ path: file });
      complaints.push(`asked for ${url}`);
      return route.abort();
    });
    await page.goto(ORIGIN);
    await page.addStyleTag({ content: style });
    await page.addScriptTag({ content: script });
    await page.evaluate('window.ready').catch((error) => complaints.push(String(error)));
    if (!(await page.evaluate('"draw" in window'))) throw new Error(complaints.join('\n'));
    const given = JSON.parse(readFileSync(drawing, 'utf8'));
    await page.clock.setFixedTime(given.to); // "two minutes ago" is as of the end of what is shown
    const panels = await page.evaluate((one) => window.draw(one), given);
    const size = await page.evaluate(() => document.documentElement.scrollHeight);
    await page.setViewportSize({ width: WIDTH, height: height ?? size });
    await page.waitForTimeout(300);
    await page.screenshot({ path: picture });
    writeFileSync(report, JSON.stringify({ panels, complaints }, null, 1));
    await page.close();
  }
} finally {
  await browser.close();
}

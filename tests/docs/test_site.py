"""The built site in a browser: no page is wider than the screen, and all of it can be read.

At a desk and on a phone, on a light page and on a dark one.

Skipped, with the reason, where `make docs` has not run or no Chromium is installed.
"""

import contextlib
import functools
import html
import json
import re
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "out" / "site"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)  # fmt: skip
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")  # fmt: skip
WIDTHS = (1280, 360)
SCHEMES = {"light": ("default", 1), "dark": ("slate", 0)}  # Material's name, Chromium's number
READABLE = 4.5  # contrast of small text, WCAG 2.2, 1.4.3
# One page after the other in a frame of the wanted width, since a window has a least one.
MEASURE = """<title>measuring</title><body><script>
const found = {}, frame = document.body.appendChild(document.createElement("iframe"));
const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
frame.style.height = "800px";
function luminances(width, height) {  // WCAG's relative ones, of what the pen has drawn, sorted
  const of = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const rgba = pen.getImageData(0, 0, width, height).data, all = new Float32Array(width * height);
  for (let i = 0; i < all.length; i++)
    all[i] = 0.2126 * of(rgba[4*i]) + 0.7152 * of(rgba[4*i + 1]) + 0.0722 * of(rgba[4*i + 2]);
  return all.sort();
}
const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
function colour(name) {
  pen.fillStyle = name;
  pen.fillRect(0, 0, 1, 1);
  return luminances(1, 1)[0];
}
function behind(element) {  // the nearest background that is not transparent
  for (; element; element = element.parentElement) {
    const name = frame.contentWindow.getComputedStyle(element).backgroundColor;
    if (!/^rgba\\(.*, 0\\)$/.test(name)) return name;
  }
  return "white";
}
function picture(image) {  // the ink that is furthest from what most of the picture is
  const [width, height] = [image.naturalWidth, image.naturalHeight];
  Object.assign(pen.canvas, {width, height});
  pen.fillStyle = behind(image);
  pen.fillRect(0, 0, width, height);
  pen.drawImage(image, 0, 0);
  const all = luminances(width, height), at = share => all[Math.floor(share * (all.length - 1))];
  return Math.max(contrast(at(0.01), at(0.5)), contrast(at(0.99), at(0.5)));
}
(async () => {
  for (const width of %s) for (const page of %s) {
    frame.style.width = width + "px";
    await new Promise(done => { frame.onload = done; frame.src = page; });
    const {documentElement: root, body} = frame.contentDocument;
    const text = frame.contentDocument.querySelector("article") || body;
    found[page + " at " + width] = {
      wide: root.scrollWidth - root.clientWidth,
      letters: root.innerText.length,
      scheme: body.dataset.mdColorScheme,
      text: contrast(colour(frame.contentWindow.getComputedStyle(text).color),
                     colour(behind(text))),
      pictures: [...text.querySelectorAll("img")].map(picture),
    };
  }
  document.title = JSON.stringify(found);
})();
</script>"""


class Handler(SimpleHTTPRequestHandler):
    pages: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()

    def do_GET(self):
        if self.path != "/measure":
            return super().do_GET()
        body = (MEASURE % (json.dumps(self.widths), json.dumps(self.pages))).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def measured(folder, profile, scheme="light", widths=WIDTHS):
    """``{"/page/ at width": {...}}`` of every page of a site in a folder, as ``MEASURE`` has it."""
    pages = sorted(
        "/" + str(p.parent.relative_to(folder)) + "/" for p in folder.rglob("index.html")
    )
    pages = tuple("/" if p == "/./" else p for p in pages)
    handler = functools.partial(
        type("Handler", (Handler,), {"pages": pages, "widths": widths}), directory=str(folder)
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_address[1]}/measure"
            colours = f"--blink-settings=preferredColorScheme={SCHEMES[scheme][1]}"
            command = [CHROMIUM, *FLAGS, colours, "--dump-dom",
                       "--timeout=240000", "--virtual-time-budget=600000", address]  # fmt: skip
            done = browsed(command, profile)
        finally:
            server.shutdown()
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title, done.stderr[-2000:]
    return json.loads(html.unescape(title[1]))


def browsed(command, profile):
    """A headless Chromium hangs at its start now and then: another one is asked, once."""
    for seconds in (120, 300):
        with contextlib.suppress(subprocess.TimeoutExpired):
            own = f"--user-data-dir={profile}-{seconds}"
            return subprocess.run([*command, own], capture_output=True, text=True, timeout=seconds)
    pytest.fail("Chromium hung twice")


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here")


@needs_chromium
@pytest.mark.slow
@pytest.mark.skipif(not SITE.is_dir(), reason="`make docs` has not been run here")
@pytest.mark.parametrize(("scheme", "widths"), [("light", WIDTHS), ("dark", WIDTHS[:1])])
def test_every_page_fits_the_screen_and_can_be_read(tmp_path, scheme, widths):
    found = measured(SITE, tmp_path, scheme, widths)
    assert len(found) > 20 * len(widths)
    assert {page["scheme"] for page in found.values()} == {SCHEMES[scheme][0]}
    assert all(page["letters"] > 200 for page in found.values())
    assert {name: page["wide"] for name, page in found.items() if page["wide"] > 0} == {}
    assert {name: page["text"] for name, page in found.items() if page["text"] < READABLE} == {}
    pictures = {name: page["pictures"] for name, page in found.items() if page["pictures"]}
    assert len(pictures) >= 3 * len(widths)
    assert {name: each for name, each in pictures.items() if min(each) < READABLE} == {}


PICTURE = """<svg xmlns='http://www.w3.org/2000/svg' width='90' height='30'>
<rect width='90' height='6' fill='#222'/></svg>"""
PAGE = """<!doctype html><body style='margin:0; background:%s; color:%s'>
<div style='width:900px'>text</div><img src='/p.svg'><img src='/p.svg' style='background:white'>"""


@needs_chromium
@pytest.mark.slow
def test_what_is_too_wide_or_too_dark_is_found(tmp_path):
    folder = tmp_path / "site"
    for name, colours in (("light", ("white", "#222")), ("dark", ("#1e2129", "#333"))):
        (folder / name).mkdir(parents=True)
        (folder / name / "index.html").write_text(PAGE % colours)
    (folder / "p.svg").write_text(PICTURE)
    found = measured(folder, tmp_path / "profile")
    assert found["/light/ at 1280"]["wide"] == 0
    assert found["/light/ at 360"]["wide"] >= 500
    light, dark = found["/light/ at 1280"], found["/dark/ at 1280"]
    assert min(light["text"], *light["pictures"]) > READABLE
    assert dark["text"] < 2
    without_card, on_card = dark["pictures"]
    assert without_card < 2 < READABLE < on_card

"""The built site in a browser: no page is wider than the screen, at a desk and on a phone.

Skipped, with the reason, where `make docs` has not run or no Chromium is installed.
"""

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
# One page after the other in a frame of the wanted width, since a window has a least one.
MEASURE = """<title>measuring</title><body><script>
const found = {}, frame = document.body.appendChild(document.createElement("iframe"));
frame.style.height = "800px";
(async () => {
  for (const width of %s) for (const page of %s) {
    frame.style.width = width + "px";
    await new Promise(done => { frame.onload = done; frame.src = page; });
    const root = frame.contentDocument.documentElement;
    found[page + " at " + width] = [root.scrollWidth - root.clientWidth, root.innerText.length];
  }
  document.title = JSON.stringify(found);
})();
</script>"""


class Handler(SimpleHTTPRequestHandler):
    pages: tuple[str, ...] = ()

    def do_GET(self):
        if self.path != "/measure":
            return super().do_GET()
        body = (MEASURE % (json.dumps(WIDTHS), json.dumps(self.pages))).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def measured(folder, profile):
    """``{"/page/ at width": (pixels too wide, letters)}`` of every page of a site in a folder."""
    pages = sorted(
        "/" + str(p.parent.relative_to(folder)) + "/" for p in folder.rglob("index.html")
    )
    pages = tuple("/" if p == "/./" else p for p in pages)
    handler = functools.partial(
        type("Handler", (Handler,), {"pages": pages}), directory=str(folder)
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://127.0.0.1:{server.server_address[1]}/measure"
            command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom",
                       "--timeout=240000", "--virtual-time-budget=600000", address]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        finally:
            server.shutdown()
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title, done.stderr[-2000:]
    return json.loads(html.unescape(title[1]))


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here")


@needs_chromium
@pytest.mark.slow
@pytest.mark.skipif(not SITE.is_dir(), reason="`make docs` has not been run here")
def test_no_page_is_wider_than_the_screen(tmp_path):
    found = measured(SITE, tmp_path)
    assert len(found) > 2 * 20
    assert all(letters > 200 for _, letters in found.values())
    assert {page: wide for page, (wide, _) in found.items() if wide > 0} == {}


@needs_chromium
@pytest.mark.slow
def test_a_page_that_is_too_wide_is_found(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    wide = "<!doctype html><body style='margin:0'><div style='width:900px'>wide</div>"
    (folder / "index.html").write_text(wide)
    found = measured(folder, tmp_path / "profile")
    assert found["/ at 1280"][0] == 0
    assert found["/ at 360"][0] >= 500

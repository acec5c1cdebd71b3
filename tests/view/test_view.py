"""Datasets in a browser: the page and the server show what is there, and run nothing that a dataset says."""

import html.parser
import http.client
import importlib
import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import pytest

from datamat import (
    BBoxes,
    ClassLabel,
    Features,
    Image,
    Json,
    ListOf,
    Mask,
    OptionError,
    OutputError,
    Scalar,
    ShardOptions,
    Tensor,
    Text,
    load,
    materialize,
    view,
)
from datamat.cli import main
from datamat.codecs import decode_image
from datamat.testing import InlineExecutor
from datamat.view import viewing

ATTACK = "</p></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
KINDS = ("cat", 'a "dog" <b>', "개")
FEATURES = Features(
    {"image": Image(), "mask": Mask(names=("sky", "road", "unused")), "kind": ClassLabel(names=KINDS), "text": Text()}
)
NUM_SAMPLES = 60


def made(number):
    """Return a sample; its kind is its number modulo 3, and every tenth has a road."""
    mask = np.full((24, 32), int(number % 10 == 0), np.uint8)
    text = ATTACK if number == 7 else f"한국어 {number}"
    return {"image": np.full((24, 32, 3), 4 * number, np.uint8), "mask": mask, "kind": number % 3, "text": text}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A finished directory with two splits."""
    folder = tmp_path_factory.mktemp("view") / "out <i>"
    materialize(
        made, range(NUM_SAMPLES), folder, features=FEATURES, splits={"train": 0.8, "val": 0.2}, progress=False,
        shards=ShardOptions(num_shards=1), executor=InlineExecutor(),
    )  # fmt: skip
    return folder


class Cards(html.parser.HTMLParser):
    """Parses a page: cards with attributes, keys and texts; tags, buttons, options of splits and classes."""

    def __init__(self, text):
        super().__init__()
        self.cards, self.tags, self.links, self.options, self.heading = [], [], {}, {}, False
        self.link, self.select, self.buttons = "", "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        if tag == "article":
            self.cards.append({**found, "key": "", "text": "", "hidden": "hidden" in found})
        self.heading = tag == "h3" or (self.heading and tag == "a")
        if tag == "a":
            self.link = found["href"]
        if tag == "button":
            self.buttons.append(found)
        if tag == "select":
            self.select = found["id"]
        if tag == "option" and self.select != "mask":
            self.options[found["value"]] = ""
            self.option = found["value"]

    def handle_endtag(self, tag):
        self.heading = self.heading and tag != "h3"
        self.link = "" if tag == "a" else self.link

    def handle_data(self, data):
        if self.cards:
            self.cards[-1]["key" if self.heading else "text"] += data
        if self.link:
            self.links[data] = self.link
        if self.tags[-1:] == ["option"] and self.select != "mask":
            self.options[self.option] += data


def number_of(options, text):
    """Return the value of the option with a text."""
    (value,) = [value for value, shown in options.items() if shown == text]
    return value


# ---------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def page(output):
    """The page of all samples."""
    return view(output, count=200)


def test_page_shows_every_sample_with_its_split_classes_and_fields(page):
    """Keys, texts, classes of labels and of pixels, and the place in the shards; nothing is loaded from elsewhere."""
    shown = Cards(page.html)

    assert page.num_samples == len(shown.cards) == NUM_SAMPLES
    assert {card["key"] for card in shown.cards} == {f"{number:08d}" for number in range(NUM_SAMPLES)}
    assert {card["data-split"] for card in shown.cards} == {"train", "val"}
    road, dog = number_of(shown.options, "mask: road"), number_of(shown.options, 'kind: a "dog" <b>')
    for card in shown.cards:
        number, classes = int(card["key"]), card["data-classes"].split()
        assert (road in classes) == (number % 10 == 0)
        assert (dog in classes) == (number % 3 == 1)
        assert f"data-{card['data-split']}-00000-of-00001.tfrecord" in card["text"]
        assert number == 7 or f"한국어 {number}" in card["text"]
    assert not re.search(r'(src|href)="(?!data:image/(jpeg|png);base64,)', page.html)


def test_page_shows_the_statistics_of_the_splits_that_it_shows(page, output):
    """Of the whole dataset, not of the samples on the page."""
    words = html.unescape(page.html[page.html.index("<h2>Statistics</h2>") :])
    dogs = sum(int(sample["kind"]) == 1 for sample in load(output, "val"))
    of_one = html.unescape(view(output, "val", count=1).html.partition("<h2>Statistics</h2>")[2])

    for text in (words, of_one):
        rows = re.findall(r"<td><pre>(.*?)</pre></td>" * 3, text)
        assert {row[1] for row in rows if row[0] == "val"} == FEATURES.keys() - {"key"}
        assert [f"{KINDS[1]} {dogs}" in row[2] for row in rows if row[:2] == ("val", "kind")] == [True]
    assert "train" in words and "train" not in of_one


def test_text_of_a_sample_is_text(page):
    """Tags in a caption, in names of classes and of the folder are shown, and are no tags of the page."""
    shown = Cards(page.html)

    assert shown.tags.count("script") == 1
    assert shown.tags.count("img") == 2 * NUM_SAMPLES  # each with its mask
    assert "onerror" in "".join(card["text"] for card in shown.cards)
    assert KINDS[1] not in page.html and "out <i>" not in page.html
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page.html)[1]
    assert "default-src 'none'" in policy and "unsafe-inline'; script" in policy and "script-src 'sha256-" in policy


def test_page_has_some_of_each_split_and_says_so(output):
    """Each split has its share, and at least one; a split alone is itself."""
    few = view(output, count=10)

    splits = [card["data-split"] for card in Cards(few.html).cards]
    assert 1 <= splits.count("val") <= 4 and few.num_samples == len(splits) == 10
    assert "10 of 60 samples" in few.html
    assert {card["data-split"] for card in Cards(view(output, "val").html).cards} == {"val"}


def test_page_is_saved_and_shown_in_a_notebook(page, tmp_path):
    """The file is the page; a notebook has it in a frame, which has no leave to reach the notebook."""
    page.save(tmp_path / "page.html")

    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    frame = page._repr_html_()
    assert Cards(frame).tags == ["iframe"] and 'sandbox="allow-scripts"' in frame
    assert "60 samples" in repr(page)


def test_damaged_record_says_so_in_its_place(output, tmp_path):
    """The others are shown; what is wrong stands on its card, on the page and from the server."""
    folder = tmp_path / "damaged"
    shutil.copytree(output, folder)
    shard = folder / "data-train-00000-of-00001.tfrecord"
    data = bytearray(shard.read_bytes())
    data[len(data) // 8] ^= 255
    shard.write_bytes(data)

    page = view(folder, count=100)
    with viewing(folder) as server:
        served = get(server.url + "?from=0")[1]

    for shown in (page.html, served):
        assert 1 <= shown.count('class="problem"') <= 2
        assert "CorruptDataError" in shown
    assert page.num_samples == NUM_SAMPLES


def test_missing_shard_says_so_on_every_card(output, tmp_path):
    """A search for a class of its samples finds nothing, and the server goes on."""
    folder = tmp_path / "missing"
    shutil.copytree(output, folder)
    (folder / "data-val-00000-of-00001.tfrecord").unlink()

    with viewing(folder) as server:
        _, every = get(server.url + "?split=val")
        status, cats = get(server.url + "?split=val&class=0")

    assert every.count('class="problem"') == len(Cards(every).cards) > 0
    assert status == 200 and Cards(cats).cards == []


def test_wrong_port_and_count_are_refused(output):
    """The error names what was found and what is wanted."""
    for port in (-1, 65_536, True, "80"):
        with pytest.raises(OptionError, match=r"viewing: port=.*; want a number from 0"), viewing(output, port=port):
            pass
    for count in (0, -1, True, 1.5):
        with pytest.raises(OptionError, match=f"view: count={count}; want at least 1 sample"):
            view(output, count=count)


def test_what_is_no_finished_directory_is_refused(output, tmp_path):
    """As `load` does."""
    with pytest.raises(OutputError):
        view(tmp_path)
    with pytest.raises(OptionError, match="no split"):
        view(output, "nothing")
    with pytest.raises(OptionError, match="is a chain of filesystems"):
        view("simplecache::s3://bucket/data")


# ---------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def server(output):
    """A server of all samples."""
    with viewing(output) as served:
        yield served


def get(url, host=None):
    """Return status and text of a page."""
    request = urllib.request.Request(url, headers={} if host is None else {"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def walk(server, query=""):
    """Return the keys on all pages, from the first to the last, page by page."""
    pages, link = [], query
    while link is not None:
        shown = Cards(get(server.url + link)[1])
        pages.append([card["key"] for card in shown.cards])
        link = shown.links.get("on ▶")
    return pages


def flat(pages):
    """Return the keys of all pages."""
    return [*itertools.chain.from_iterable(pages)]


def test_pages_show_every_sample_once(server):
    """In the order of the splits; the last page may have fewer."""
    pages = walk(server)

    assert [len(keys) for keys in pages] == [24, 24, 12]
    assert sorted(flat(pages)) == [f"{number:08d}" for number in range(NUM_SAMPLES)]


def test_pages_of_a_class_and_a_split_show_these_alone(server):
    """Classes of labels and of pixels; all of them, once."""
    options = Cards(get(server.url)[1]).options
    cats = f"?class={number_of(options, 'kind: cat')}"
    roads = f"?class={number_of(options, 'mask: road')}"

    assert sorted(flat(walk(server, cats))) == [f"{number:08d}" for number in range(0, NUM_SAMPLES, 3)]
    assert sorted(flat(walk(server, roads))) == [f"{number:08d}" for number in range(0, NUM_SAMPLES, 10)]
    val = flat(walk(server, "?split=val"))
    assert 0 < len(val) < 30
    both = flat(walk(server, cats.replace("?", "?split=val&")))
    assert sorted(both) == sorted(key for key in val if int(key) % 3 == 0)


def test_sample_has_all_fields_and_where_it_came_from(server):
    """By number from a card, and by key; neighbours are linked."""
    first = Cards(get(server.url)[1])
    link = first.links[first.cards[1]["key"]]

    status, by_link = get(server.url + link)
    _, by_key = get(server.url + "sample?key=00000007")

    assert status == 200
    assert [button["value"] for button in Cards(by_link).buttons if button.get("name") == "at"] == ["0", "2"]
    for text in ("Where it came from", "kind", "uint8 (24, 32, 3)", "data-", ".tfrecord", "seed"):
        assert text in by_key
    assert "<script" not in by_key and "&lt;script&gt;" in by_key


def test_part_of_a_key_finds_a_page_of_samples(server):
    """In either case, and with a class; a key that is whole comes first, and there are more pages where many match."""
    options = Cards(get(server.url)[1]).options

    assert sorted(flat(walk(server, "?key=1"))) == [f"{n:08d}" for n in range(NUM_SAMPLES) if "1" in str(n)]
    assert flat(walk(server, "?key=00000042")) == ["00000042"]
    assert [len(keys) for keys in walk(server, "?key=000")] == [24, 24, 12]
    cats = f"?key=1&class={number_of(options, 'kind: cat')}"
    assert sorted(flat(walk(server, cats))) == [f"{n:08d}" for n in range(0, NUM_SAMPLES, 3) if "1" in str(n)]
    status, text = get(server.url + "?key=" + urllib.parse.quote('"><script>'))
    assert status == 200 and Cards(text).cards == [] and "<script" not in text


def test_whole_key_comes_before_keys_that_hold_it(tmp_path):
    """Numbers without zeros before them: 7, then 17, 70 and all others."""
    materialize(
        lambda number: {"x": number}, range(80)[::-1], tmp_path / "out", key=lambda item: f"Row{item}", progress=False,
        executor=InlineExecutor(),
    )  # fmt: skip

    with viewing(tmp_path / "out") as server:
        for digit in range(1, 8):
            found = flat(walk(server, f"?key=Row{digit}"))
            assert found[0] == f"Row{digit}"
            wanted = sorted([found[0], *(f"Row{number}" for number in range(10 * digit, 10 * digit + 10))])
            assert sorted(found) == sorted(flat(walk(server, f"?key=row{digit}"))) == wanted


def test_opacity_of_masks_is_kept_from_page_to_page(server):
    """What is asked for is chosen on the page, and in its links; another value is the usual one."""
    for mask, chosen in {"0": "0", "75": "75", "": "50", "x": "50", '"><b>': "50"}.items():
        for path in ("?", "sample?at=3&"):
            text = get(f"{server.url}{path}mask={urllib.parse.quote(mask)}")[1]
            assert re.findall(r'<option value="(\d+)" selected>[^<]*mask', text) == [chosen]
            assert not {link for link in Cards(text).links.values() if f"mask={chosen}" not in link}


def test_picture_of_a_sample_is_drawn_with_more_pixels(server):
    """A request says so, and cannot choose how many."""
    small, large = (get(server.url + f"sample?at=3{more}")[1] for more in ("", "&large=1"))

    widths = [int(re.search(r'<img [^>]*width="(\d+)"', text)[1]) for text in (small, large)]
    assert widths == [900, 4096]


PATHS = [
    *("/", "/index.html", "/../", "/wrong/", "/wrong/sample?at=0", "TOKEN/../manifest.json", "TOKEN/manifest.json"),
    *("//[", "x", "/%ff%fe/", "TOKEN/sample?key=%00", "TOKEN/sample?key=%ff", "TOKEN/sample?key=nobody"),
    *("TOKEN/..%2f..%2fetc/passwd", "TOKEN/sample", "TOKEN/sample?at=60", "TOKEN/sample?at=-1"),
    *("TOKEN/sample?key=../../x", "TOKEN/sample/manifest.json", "TOKEN/sample?at=%C2%B2"),
]


def test_other_paths_are_not_found(server):
    """No path names a file, and nothing is said to those who do not know the random one."""
    token = urllib.parse.urlsplit(server.url).path.rstrip("/")
    for path in PATHS:
        connection = http.client.HTTPConnection(*server.url.split("/")[2].split(":"), timeout=30)
        connection.request("GET", path.replace("TOKEN", token))  # as it is: urllib would shorten it
        answer = connection.getresponse()

        text = answer.read().decode()
        assert answer.status == 404, path
        assert token not in text and "root:" not in text and "fingerprint" not in text
        connection.close()


def test_pages_run_no_script_and_are_kept_nowhere(server):
    """The policy is in the page, and the headers keep it out of caches and frames."""
    with urllib.request.urlopen(server.url, timeout=30) as answer:
        headers, text = answer.headers, answer.read().decode()

    assert "script-src" not in text and "default-src 'none'" in text
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Frame-Options"] == "DENY" and headers["X-Content-Type-Options"] == "nosniff"


def test_other_names_of_this_machine_are_refused(server):
    """A page elsewhere cannot have its own name point here, and read the answer."""
    port = urllib.parse.urlsplit(server.url).port

    assert get(server.url, "evil.example")[0] == get(server.url, f"evil.example:{port}")[0] == 403
    assert get(server.url, f"localhost:{port}")[0] == 200


def test_odd_numbers_in_a_request_are_left_out(server):
    """The page is that of what is left."""
    for query in ("?class=999", "?class=x", "?from=-5", "?from=x", "?split=nothing", "?page=<script>", "?from=9999"):
        status, text = get(server.url + urllib.parse.quote(query, safe="?=&"))
        assert status == 200 and "<script" not in text


def test_error_while_answering_is_logged_and_not_printed(output, monkeypatch, capfd, caplog):
    """The next request is answered."""
    with viewing(output) as server:
        with monkeypatch.context() as broken:
            broken.setattr(importlib.import_module("datamat.view.server"), "render", lambda *_, **__: 1 / 0)
            with pytest.raises(http.client.RemoteDisconnected):
                get(server.url)
        assert get(server.url)[0] == 200

    assert "a request failed" in caplog.text and "ZeroDivisionError" in caplog.text
    assert capfd.readouterr().err == ""


def test_server_listens_on_the_loopback_address_and_ends_with_its_block(output):
    """Its port is free again at once."""
    with viewing(output) as server:
        port = urllib.parse.urlsplit(server.url).port
        assert server.url.startswith("http://127.0.0.1:")
        assert len(urllib.parse.urlsplit(server.url).path) > 16

    with socket.create_server(("127.0.0.1", port)):
        pass


# ---------------------------------------------------------------- fields

TABLES = {
    "cars": [{"name": ATTACK, "area": 1.5}, {"name": "개", "area": 2.0}],
    "spots": {"at": np.array([3, 4]), "kind": np.array([0, 1])},
    "pose": np.array([[1, 2.5], [3, 4]], np.float32),
    "json": [{"id": n, "tags": ["a", "b"]} for n in range(100)],
    "sides": {"left": [1, 2], "right": ["x", None]},
    "facts": {"camera": "front", "gps": [1, 2]},
    "ragged": [[1], [2, 3]],
    "plain": [1, 2, 3],
    "empty": {},
}
WANTED = {
    "cars": ["area", "name", "1.5", ATTACK, "2", "개"],
    "spots": ["at", "kind", "3", "cat", "4", KINDS[1]],
    "pose": ["1", "2.5", "3", "4"],
    "json": ["id", "tags", "0", '["a", "b"]', "1"],
    "sides": ["left", "right", "1", "x", "2", "null"],
    "facts": ["camera", "front", "gps", "[1, 2]"],
    "ragged": ["1", "2", "3"],
}


class Tables(html.parser.HTMLParser):
    """Parses the fields on the page of a sample: the texts of the cells of the table that is in each, by name."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.depth, self.name, self.expects_name = {}, 0, "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.depth += tag == "table"
        self.expects_name = (self.expects_name or tag == "tr") and self.depth == 1

    def handle_endtag(self, tag):
        self.depth -= tag == "table"

    def handle_data(self, data):
        if self.depth == 2:
            self.cells.setdefault(self.name, []).extend([data] * bool(data.strip()))
        elif self.expects_name and data.strip():
            self.name, self.expects_name = data, False


def test_values_with_rows_are_tables(tmp_path):
    """Lists of dicts and dicts of lists, numbers, JSON; all of it is text, and long ones end with how many more."""
    features = {
        "cars": ListOf({"name": Text(), "area": Scalar("float32")}),
        "spots": {"at": ListOf(Scalar("int64")), "kind": ListOf(ClassLabel(names=KINDS))},
        "pose": Tensor((2, 2), "float32"),
        **{name: Json() for name in ("json", "sides", "facts", "ragged", "plain", "empty")},
    }
    materialize(
        lambda _: TABLES, range(1), tmp_path / "out", features=features, progress=False, executor=InlineExecutor()
    )

    with viewing(tmp_path / "out") as server:
        text = get(server.url + "sample?at=0")[1]
    page = view(tmp_path / "out").html

    found = Tables(text).cells
    assert {name: found[name][: len(cells)] for name, cells in WANTED.items()} == WANTED
    assert found.keys() == WANTED.keys()
    assert found["json"][-1] == "… and 36 more" and "… and 84 more" in page
    assert "<script" not in text and page.count("<script") == 1


# ---------------------------------------------------------------- the command


def test_command_writes_the_page(output, tmp_path, monkeypatch, capsys):
    """Named after the directory, or where it is told; with JSON, too."""
    monkeypatch.chdir(tmp_path)

    assert main(["view", str(output), "--count", "5"]) == 0
    said = capsys.readouterr().out
    assert main(["view", str(output), "--count", "5", "--output", "own.html", "--split", "val", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)

    assert said == "out <i>.html\n"
    assert len(Cards((tmp_path / "out <i>.html").read_text(encoding="utf-8")).cards) == 5
    assert facts["output"] == "own.html"
    own = Cards((tmp_path / "own.html").read_text(encoding="utf-8")).cards
    assert {card["data-split"] for card in own} == {"val"}


def test_command_serves_until_a_signal(output):
    """It prints the address once it answers; SIGTERM is a success."""
    command = [sys.executable, "-m", "datamat", "view", str(output), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            status, text = get(url)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0

    assert status == 200 and len(Cards(text).cards) == 24


# ---------------------------------------------------------------- in a browser


BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """A function that has headless Chromium open an address, with options, and returns what it prints."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium here; apt-get install chromium")
    profile = tmp_path_factory.mktemp("chromium")

    def opened(url, *options):
        return subprocess.run(
            [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={profile}", *options, url],
            check=True, capture_output=True, text=True, timeout=200,
        ).stdout  # fmt: skip

    return opened


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "state", ["#words=onerror", *(pytest.param(name, marks=pytest.mark.long) for name in ("", "#split=val", "#class="))]
)
def test_browser_pages_filters_and_runs_nothing_of_the_dataset(page, browse, tmp_path, state):
    """The script shows 24 cards, those of a split, of a class or with a text; a caption with a script is a caption."""
    page.save(tmp_path / "page.html")
    road = number_of(Cards(page.html).options, "mask: road") if state == "#class=" else ""

    text = browse((tmp_path / "page.html").as_uri() + state + road, "--dump-dom")

    assert "<title>data: 60 samples</title>" in text
    shown = [card for card in Cards(text).cards if not card["hidden"]]
    if not state:
        assert len(shown) == 24 and "60 samples, page 1 of 3" in text
    elif state == "#split=val":
        assert {card["data-split"] for card in shown} == {"val"}
    elif state == "#class=":
        assert {int(card["key"]) % 10 for card in shown} == {0}
    else:
        assert [card["key"] for card in shown] == ["00000007"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_browser_shows_page_and_server_light_and_dark(page, server, browse, tmp_path):
    """Dark ink on light paper, light ink on dark paper, pictures with the colours of their masks on both."""
    page.save(tmp_path / "page.html")
    for url in ((tmp_path / "page.html").as_uri(), server.url):
        means = {}
        for scheme, options in {"light": [], "dark": ["--blink-settings=preferredColorScheme=0"]}.items():
            picture = tmp_path / f"{scheme}.png"
            browse(url, f"--screenshot={picture}", "--window-size=1000,900", *options)
            pixels = decode_image(picture.read_bytes(), channels=3).astype(int)
            strips = pixels[:60]  # above the pictures
            means[scheme] = strips.mean()
            assert len(np.unique(pixels.reshape(-1, 3)[::7], axis=0)) > 50, f"{scheme}: no pictures"
        assert means["light"] > 200 and means["dark"] < 80, means


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", [800, 1280])
def test_browser_keeps_the_shape_of_pictures(browse, tmp_path, width):
    """A picture four by three stays that on a card and on its own page, in windows of any width."""
    materialize(
        lambda _: {"image": np.full((90, 120, 3), (255, 0, 255), np.uint8)}, range(1), tmp_path / "out",
        features=Features({"image": Image()}), progress=False, executor=InlineExecutor(),
    )  # fmt: skip
    view(tmp_path / "out").save(tmp_path / "page.html")

    with viewing(tmp_path / "out") as server:
        for url in ((tmp_path / "page.html").as_uri(), server.url + "sample?at=0"):
            browse(url, f"--screenshot={tmp_path / 'shape.png'}", f"--window-size={width},1000")
            red, green, blue = np.moveaxis(decode_image((tmp_path / "shape.png").read_bytes(), channels=3), 2, 0)
            rows, columns = np.nonzero((red > 200) & (green < 60) & (blue > 200))
            assert np.ptp(columns) / np.ptp(rows) == pytest.approx(4 / 3, rel=0.05), url


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "percent", [100, pytest.param(0, marks=pytest.mark.long), pytest.param("", marks=pytest.mark.long)]
)
def test_browser_lays_masks_over_pictures(browse, tmp_path, percent):
    """As opaque as is chosen; boxes are seen over them always."""
    mask = Mask(names=("a",), palette=((0, 0, 255),))
    box = np.array([[0.25, 0.25, 0.75, 0.75]], np.float32)
    materialize(
        lambda _: {"image": np.full((90, 120, 3), (255, 0, 0), np.uint8), "mask": np.zeros((90, 120), np.uint8),
                   "boxes": box},
        range(1), tmp_path / "out", features=Features({"image": Image(), "mask": mask, "boxes": BBoxes()}),
        progress=False, executor=InlineExecutor(),
    )  # fmt: skip
    view(tmp_path / "out").save(tmp_path / "page.html")

    address = (tmp_path / "page.html").as_uri() + f"#mask={percent}" * bool(percent != "")
    browse(address, f"--screenshot={tmp_path / 'mask.png'}", "--window-size=800,600")
    pixels = decode_image((tmp_path / "mask.png").read_bytes(), channels=3).astype(int)

    blue = 255 * (50 if percent == "" else percent) // 100
    plain = np.abs(pixels - [255 - blue, 0, blue]).max(2) < 12
    outline = np.abs(pixels - [255, 64, 64]).max(2) < 40
    rows, columns = np.nonzero(plain)
    assert plain.sum() > 20_000
    assert outline[rows.min() : rows.max(), columns.min() : columns.max()].sum() > 300


@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", [800, pytest.param(1280, marks=pytest.mark.long)])
def test_browser_shows_a_picture_as_large_as_the_window(browse, tmp_path, width):
    """A press on its button does, without a script of the page."""
    materialize(
        lambda _: {"image": np.full((90, 120, 3), (255, 0, 255), np.uint8)}, range(1), tmp_path / "out",
        features=Features({"image": Image()}), progress=False, executor=InlineExecutor(),
    )  # fmt: skip
    press = "<script>document.querySelector('[popovertarget]').click()</script></body>"
    with viewing(tmp_path / "out") as server:
        text = get(server.url)[1].replace("</body>", press)
    (tmp_path / "page.html").write_text(re.sub(r"<meta http-equiv[^>]*>", "", text), encoding="utf-8")

    browse((tmp_path / "page.html").as_uri(), f"--screenshot={tmp_path / 'zoom.png'}", f"--window-size={width},900")

    pixels = decode_image((tmp_path / "zoom.png").read_bytes(), channels=3).astype(int)
    rows, columns = np.nonzero(np.abs(pixels - [255, 0, 255]).max(2) < 20)
    assert np.ptp(columns) > 0.9 * min(width, 900 * 4 / 3) and np.ptp(rows) > 0.9 * 600

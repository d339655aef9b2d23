"""Behaviour of the run report: pages of real run folders, whole, damaged and under way."""

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reordered import reordered_ops
from test_runlog import CLEAN, HEALTHY, completion, lines

from recipes import grpo_gsm8k
from recipes.report import main
from recipes.report_page import MOST_CHARACTERS, text
from recipes.report_panels import PANELS, lag_tokens, split_panels
from recipes.report_runs import Group, group_runs, load_runs
from recipes.report_samples import moments
from recipes.report_words import verdict
from recipes.runlog import RunLog

SMALL = [
    *("--preset", "tiny", "--runtime", "inline", "--steps", "2", "--prompts-per-step", "3"),
    *("--group-size", "4", "--max-tokens", "24", "--evaluation.problems", "4", "--device", "cpu"),
]
VOID = {"meta", "link", "img", "br", "input"}


class Reader(HTMLParser):
    """Elements, and whether every one that opens is closed in order."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.attributes, self.open, self.crossed = [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.crossed.append(tag)


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> dict[str, Path]:
    """Two bitwise runs that differ in the seed, and one without contracts in the sampler."""
    base = tmp_path_factory.mktemp("runs")
    words = {"first": [], "second": ["--seed", "1"], "ordinary": ["--mode", "none"]}
    with reordered_ops():
        for name, more in words.items():
            assert grpo_gsm8k.main([*SMALL, *more, "--out", str(base / name)]) == 0
    return {name: base / name for name in words}


@pytest.fixture(scope="module")
def all_three(real, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("report") / "three.html"
    assert main([*map(str, real.values()), "--out", str(out)]) == 0
    return out


def write_run(folder: Path, steps: int = 4, config: dict | None = None, **metrics) -> Path:
    """A run's folder by the project's own log; metrics are functions of the step."""
    with RunLog(folder, steps) as log:
        for step in range(1, steps + 1):
            more = {name.replace("__", "/"): value(step) for name, value in metrics.items()}
            log.step(step, {**HEALTHY, **CLEAN, **more}, [completion(), completion("18", 0.0)])
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


BITWISE = {"mode": "bitwise", "seed": 0, "steps": 4, "trainer": {"learning_rate": 1e-3}}


def report(*folders: Path, out: Path) -> str:
    assert main([*map(str, folders), "--out", str(out)]) == 0
    return out.read_text("utf-8")


def cells(page: str, row: str) -> list[str]:
    """The cells of the table's row."""
    (found,) = re.findall(
        rf'<th scope="row">{re.escape(text(row))}</th>(.*?)</tr>', page, re.DOTALL
    )
    return [unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", found, re.DOTALL)]


def test_the_page_needs_nothing_from_outside(all_three):
    page = all_three.read_text("utf-8")
    reader = Reader(page)
    assert not reader.crossed and not reader.open
    assert not {"script", "link", "iframe", "img", "object", "base"} & set(reader.tags)
    addresses = [v or "" for k, v in reader.attributes if k in ("src", "href", "xlink:href")]
    files = [each for each in addresses if not each.startswith("#")]
    assert files and all((all_three.parent / each).is_file() for each in files)
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert "default-src 'none'" in page
    identities = [value for name, value in reader.attributes if name == "id"]
    assert len(identities) == len(set(identities)) > 100
    assert {each[1:] for each in addresses if each.startswith("#")} <= set(identities)


def test_every_chart_has_words_a_picture_and_named_axes(all_three):
    page = all_three.read_text("utf-8")
    figures = re.findall(r'<figure id="(\w+)"><svg role="img" aria-label="([^"]*)"', page)
    names = {name for name, _ in figures}
    assert {
        "reward",
        "parity",
        "kl_sampler_trainer",
        "dead_groups",
        "length",
        "time_parts",
    } <= names
    assert {"accuracy_sampled_strict", "rollout_speed", "train_speed"} <= names
    for name, words in figures:
        assert re.match(r".+; x: .+, y: .+\. .*(first|ordinary)", words), name
        picture = (all_three.parent / "three_charts" / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 5000
    assert len(list((all_three.parent / "three_charts").iterdir())) == len(figures)


def test_numbers_are_those_of_the_files(real, all_three):
    page = all_three.read_text("utf-8")
    rows = {name: lines(folder / "metrics.jsonl") for name, folder in real.items()}
    scores = {name: lines(folder / "evaluations.jsonl") for name, folder in real.items()}
    for name, key in (("compared", "parity/tokens_compared"), ("differing", DIFFERING)):
        sums = [f"{sum(row[key] for row in each):,}" for each in rows.values()]
        assert cells(page, f"fresh tokens {name}") == sums
    assert cells(page, "--mode") == ["bitwise", "bitwise", "none"]
    assert cells(page, "--seed") == ["0", "1", "0"]
    kl = [max(row["kl/sampler_trainer"] for row in each) for each in rows.values()]
    assert cells(page, "largest KL(sampler || trainer)") == ["0.0 exactly"] * 2 + [f"{kl[2]:.3g}"]
    for found, each in zip(cells(page, "reward, first → last step"), rows.values(), strict=True):
        assert found == f"{each[0]['reward']:.3f} → {each[-1]['reward']:.3f}"
    speeds = [sum(row["tokens_per_second/rollout"] for row in each) / 2 for each in rows.values()]
    assert cells(page, "rollout, tokens/s (median)") == [f"{speed:,.0f}" for speed in speeds]
    shown = cells(page, "accuracy, greedy, strict")
    for (first, last), cell in zip(scores.values(), shown, strict=True):
        assert cell == f"step 0: {share(first)}\nstep 2: {share(last)}"


DIFFERING = "parity/tokens_differing"


def share(row: dict) -> str:
    three = (100 * row[f"eval/greedy_strict{end}"] for end in ("", "/low", "/high"))
    return "{:.1f}% ({:.1f} to {:.1f})".format(*three)


def test_the_verdict_stands_at_the_top_in_words(real, all_three):
    page = all_three.read_text("utf-8")
    total = {
        n: [sum(r[k] for r in lines(f / "metrics.jsonl")) for k in COUNTS] for n, f in real.items()
    }
    compared, differing = total["ordinary"]
    assert differing > 0
    for said in (
        f"✓ Bitwise: {total['first'][0]:,} tokens compared, 0 differ",
        f"✓ Bitwise: {total['second'][0]:,} tokens compared, 0 differ",
        f"○ Comparison run (mode none): {differing:,} of {compared:,} tokens differ",
    ):
        assert 0 < page.index(said) < page.index("<table>")


COUNTS = ("parity/tokens_compared", DIFFERING)


def test_completions_stand_side_by_side(real, all_three):
    runs = load_runs([str(real["first"]), str(real["ordinary"])])
    early, late = moments(runs)
    for moment in (early, late):
        for prompt, held in moment.prompts.items():
            for run, one in zip(runs, held, strict=True):
                rows = [r for r in lines(run.folder / "completions.jsonl") if r["step"] == one.step]
                rewards = [r["reward"] for r in rows if r["prompt"] == prompt]
                assert one.rewards == rewards and len(rewards) == 4
                assert (one.best["reward"], one.worst["reward"]) == (max(rewards), min(rewards))
    assert {one.step for held in early.prompts.values() for one in held if one} == {1}
    assert {one.step for held in late.prompts.values() for one in held if one} == {2}
    page = all_three.read_text("utf-8")
    assert all(text(p) in page for p in early.prompts)


def test_a_report_of_one_run_lies_in_its_folder_and_is_made_anew(tmp_path, capsys):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "report.html"
    for _ in range(2):
        assert main([str(tmp_path / "run")]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == str(path)
        assert "<h2>In numbers</h2>" in path.read_text("utf-8")


def test_several_runs_are_reported_here(tmp_path, monkeypatch):
    folders = [write_run(tmp_path / name) for name in "ab"]
    monkeypatch.chdir(tmp_path)
    assert main(list(map(str, folders))) == 0
    assert (tmp_path / "report.html").exists() and (tmp_path / "report_charts").is_dir()


def test_seeds_are_drawn_as_a_band_and_n_is_said(tmp_path):
    folders = [
        write_run(
            tmp_path / f"s{seed}", config={**BITWISE, "seed": seed}, reward=lambda s, d=seed: s + d
        )
        for seed in (0, 1, 5)
    ]
    other = write_run(tmp_path / "other", config={**BITWISE, "trainer": {"learning_rate": 1.0}})
    page = report(*folders, other, out=tmp_path / "r.html")
    assert "s0 +2 (mean, n = 3): 3 at step 1, 6 at step 4." in page
    assert "Drawn as one: s0, s1, s5 (n = 3; they differ in the seed alone)" in page
    assert cells(page, "--trainer.learning-rate") == ["0.001"] * 3 + ["1.0"]
    assert "-FillBetweenPolyCollection" in page
    assert main([*map(str, folders), "--apart", "--out", str(tmp_path / "apart.html")]) == 0
    apart = (tmp_path / "apart.html").read_text("utf-8")
    assert "n = 3" not in apart and "s1: 2 at step 1, 5 at step 4." in apart


def test_only_the_seed_makes_a_band(tmp_path):
    write_run(tmp_path / "a", config=BITWISE)
    write_run(tmp_path / "again", config=BITWISE)
    write_run(tmp_path / "mode", config={**BITWISE, "mode": "none", "seed": 1})
    write_run(tmp_path / "unknown")
    runs = load_runs([str(tmp_path / name) for name in ("a", "again", "mode", "unknown")])
    assert [len(group.runs) for group in group_runs(runs)] == [1, 1, 1, 1]


def test_what_a_completion_holds_is_only_text(tmp_path):
    evil = (
        "</pre><script>alert('x')</script><img src=https://example.org/a>&amp; \x00\x1b[31m\u202e"
    )
    with RunLog(tmp_path / "<b>&'\"$x$", 1) as log:
        rows = [completion(evil), completion("y" * (MOST_CHARACTERS + 7), 0.0, prompt=evil)]
        log.step(1, {**HEALTHY, **CLEAN}, rows)
    page = report(tmp_path / "<b>&'\"$x$", out=tmp_path / "r.html")
    reader = Reader(page)
    assert not reader.crossed and not reader.open
    assert not {"script", "img", "b"} & set(reader.tags)
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in page and "␀␛[31m" in page
    assert "\x00" not in page and "&amp;amp;" in page
    assert "[7 characters more]" in page


def test_a_completion_that_was_not_judged_is_neither_best_nor_worst(tmp_path):
    rewards = (None, 0.5, 0.0, None, 1.0)
    with RunLog(tmp_path / "run", 1) as log:
        rows = [completion(f"answer {reward}", reward) for reward in rewards]
        rows += [completion("unknown", None, prompt="Why?")] * 2
        log.step(1, {**HEALTHY, **CLEAN}, rows)
    early = moments(load_runs([str(tmp_path / "run")]))[0].prompts
    (judged,), (other,) = early["How many?"], early["Why?"]
    assert judged and other and judged.rewards == list(rewards)
    assert (judged.best["reward"], judged.worst["reward"]) == (1.0, 0.0)
    assert "not judged" in report(tmp_path / "run", out=tmp_path / "r.html")
    assert other.best is other.worst


ASYNC = {
    "kl__mismatch": lambda step: 0.0,
    "kl__lag": lambda step: 1e-3 * step,
    "lag__versions_mean": lambda step: 0.5 * step,
    "lag__versions_max": lambda step: step,
    "lag__tokens__0": lambda step: 100,
    "lag__tokens__1": lambda step: 50 * step,
    "parity__lag_rescored_compared": lambda step: 50 * step,
    "parity__lag_rescored_differing": lambda step: 0,
    "async__groups_refreshed": lambda step: step,
    "async__groups_dropped": lambda step: 0,
    "sampling__effective_sample_size": lambda step: 1 / step,
    "clip_ratio__low_mean": lambda step: 0.01 * step,
}


def test_lag_is_drawn_where_a_run_has_it(tmp_path):
    write_run(tmp_path / "async", config=BITWISE, **ASYNC)
    page = report(tmp_path / "async", out=tmp_path / "r.html")
    charted = set(re.findall(r'<figure id="(\w+)"', page))
    drawn = {"kl_mismatch", "kl_lag", "lag_mean", "lag_max", "lag_histogram", "refreshed"}
    assert drawn | {"rescored", "effective_sample_size", "clip_low"} <= charted
    assert "dropped" not in charted and "Groups dropped as too old: 0 " in page
    assert "async, 900 tokens: 44.4% 0 behind, 55.6% 1 behind." in page
    assert "Of these, stale tokens proved again: 500 compared, 0 differ" in page
    (run,) = load_runs([str(tmp_path / "async")])
    assert lag_tokens(Group("async", (run,))) == {0: 400, 1: 500}


def test_steps_without_stale_tokens_count_as_fresh(tmp_path):
    behind = {"lag__versions_max": lambda step: step - 1}
    behind |= {f"lag__tokens__{n}": lambda step, n=n: 10 * n * (step > 1) for n in (0, 1)}
    write_run(tmp_path / "async", steps=2, **behind)
    (run,) = load_runs([str(tmp_path / "async")])
    assert lag_tokens(Group("async", (run,))) == {0: 5321, 1: 10}
    assert "10 stale tokens were not proved again" in verdict(run).details


def test_runs_without_lag_have_no_such_panels(tmp_path):
    page = report(write_run(tmp_path / "plain"), out=tmp_path / "r.html")
    assert not re.search(r'<figure id="(lag|kl_lag|kl_mismatch|refreshed|clip)', page)


def test_a_wide_range_gets_a_log_scale_that_shows_zero(tmp_path):
    sizes = (0.0, 1e-13, 3e-7, 1e-2)
    differing = {"kl__sampler_trainer": lambda step: sizes[step - 1]}
    write_run(tmp_path / "a", config={**BITWISE, "mode": "none"}, **differing)
    page = report(tmp_path / "a", out=tmp_path / "r.html")
    start = page.index('<figure id="kl_sampler_trainer"')
    figure = page[start : page.index("</figure>", start)]
    ticks = re.findall(r"<!-- (.*?) -->", figure)
    assert {"0", "1e-13", "1e-03"} <= set(ticks) and not any("$" in tick for tick in ticks)


def test_a_metric_that_never_changes_is_said_and_not_charted(tmp_path):
    write_run(tmp_path / "a", learning_rate=lambda step: 3e-4)
    charted, constant = split_panels(load_runs([str(tmp_path / "a")]))
    keys = [panel.key for panel in charted]
    assert "learning_rate" not in keys and {"reward", DIFFERING, "kl/sampler_trainer"} <= {*keys}
    assert {panel.key: number for panel, number in constant.items()}["learning_rate"] == 3e-4
    assert len({panel.name for panel in PANELS}) == len(PANELS)

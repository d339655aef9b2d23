"""The report as one HTML page that needs nothing beside it: no script, no address, no font."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from recipes.report_charts import Chart, Style, styles
from recipes.report_panels import SECTIONS, Panel
from recipes.report_runs import Group, Run
from recipes.report_samples import RUNS_SHOWN, Answers, Moment
from recipes.report_words import Verdict, state, table, verdict

GENERATOR = '<meta name="generator" content="zerokl report">'
MOST_CHARACTERS = 4000
SIGNS = {"good": "✓", "bad": "✗", "open": "○"}
# Control characters would act on the page or end it; they become their own pictures.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --page: #ffffff;
  --card: #f6f8fa; --line: #d1d9e0; --good: #00694b; --bad: #b3261e; --open: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #a2abb5; --page: #15181c;
  --card: #1e2227; --line: #3a424b; --good: #4fd1a5; --bad: #ff9d8f; --open: #7cc0f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1320px; padding: 16px clamp(12px, 3vw, 32px) 48px;
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .7rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; overflow-wrap: anywhere; }
p { margin: .3rem 0; } .soft, figcaption, .facts { color: var(--soft); font-size: .86rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .84rem; }
.cards, .charts, .side { display: grid; gap: 14px; margin-top: .7rem; }
.cards { grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 370px), 1fr)); }
.card, figure { border: 1px solid var(--line); border-radius: 8px; background: var(--card);
  padding: 12px; margin: 0; min-width: 0; overflow-wrap: anywhere; }
.card { border-left: 5px solid var(--tone); } .card strong { color: var(--tone); }
.good { --tone: var(--good); } .bad { --tone: var(--bad); } .open { --tone: var(--open); }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); }
figcaption { margin-top: 6px; } a { color: inherit; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: separate; border-spacing: 0; min-width: 100%; font-size: .88rem; }
th, td { padding: 6px 12px; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th[scope=row] { font-weight: 500; position: sticky; left: 0; background: var(--page);
  min-width: 9.5rem; max-width: 40vw; overflow-wrap: anywhere; }
thead th { background: var(--card); } td, thead th { min-width: 14.5rem; white-space: pre-line;
  overflow-wrap: anywhere; } tr:last-child > * { border-bottom: 0; }
thead th:first-child { min-width: 0; position: sticky; left: 0; }
.side { grid-auto-flow: column; grid-auto-columns: minmax(min(78vw, 280px), 1fr);
  overflow-x: auto; } .side > div { min-width: 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0 .6rem; padding: 8px;
  max-height: 22rem; overflow-y: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; unicode-bidi: isolate; }
pre.prompt { border-style: dashed; } .swatch { width: 34px; height: 10px; vertical-align: middle; }
ul { margin: .3rem 0; padding-left: 1.2rem; } details { margin-top: .6rem; }
"""


def page(
    runs: Sequence[Run],
    groups: Sequence[Group],
    charts: Sequence[Chart],
    constant: Mapping[Panel, float],
    shown: Sequence[Moment],
    images: str,
    made: str,
) -> str:
    """The whole page. images: folder of the charts' PNG files, from the page. made: when."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = [
        f"<h1>zerokl: {text(title)}</h1>",
        f'<p class="soft">Run report, made {text(made)}.</p>',
        _verdicts(runs),
        "<h2>Compared</h2>" if len(runs) > 1 else "<h2>In numbers</h2>",
        _table(runs, groups),
        *(_section(name, charts, images) for name in SECTIONS),
        _constant(constant),
        _samples(runs, shown),
    ]
    head = [
        '<meta charset="utf-8">',
        GENERATOR,
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">",
        f"<title>zerokl report: {text(title)}</title>",
        f"<style>{STYLE}</style>",
    ]
    parts = ["<!doctype html>", '<html lang="en">', "<head>", *head, "</head>", "<body>", *body]
    return "\n".join([*filter(None, parts), "</body>", "</html>", ""])


def text(value: Any) -> str:
    """Any text, safe in an element or a quoted attribute."""
    return escape(str(value).replace("\r\n", "\n").translate(VISIBLE))


def _verdicts(runs: Sequence[Run]) -> str:
    cards = "\n".join(_card(run, verdict(run)) for run in runs)
    return f'<div class="cards">\n{cards}\n</div>'


def _card(run: Run, said: Verdict) -> str:
    details = "".join(f"<li>{text(line)}</li>" for line in said.details)
    damage = "".join(f"<li>Damaged: {text(line)}</li>" for line in run.damage)
    return (
        f'<div class="card {said.tone}"><p class="soft">{text(run.name)}: {text(state(run))}</p>'
        f"<p><strong>{SIGNS[said.tone]} {text(said.headline)}</strong></p>"
        f'<ul class="facts">{details}{damage}</ul></div>'
    )


def _table(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    looks = dict(zip((g.label for g in groups), styles(len(groups)), strict=True))
    of_run = {run.name: looks[group.label] for group in groups for run in group.runs}
    heads = "".join(
        f'<th scope="col">{_swatch(of_run[run.name]) if len(groups) > 1 else ""}'
        f"{text(run.name)}</th>"
        for run in runs
    )
    rows = "\n".join(
        f'<tr><th scope="row">{text(name)}</th>'
        + "".join(f"<td>{text(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, cells in table(runs).items()
    )
    corner = '<th scope="col">run</th>'
    notes = [
        f"Drawn as one: {text(', '.join(run.name for run in group.runs))} "
        f"(n = {len(group.runs)}; they differ in the seed alone): the line is their mean, the band "
        "goes from the least to the greatest, faint lines are the single runs."
        for group in groups
        if group.is_band
    ]
    below = f'<p class="soft">Intervals are at 95%. {" ".join(notes)}</p>'
    return (
        f'<div class="scroll"><table>\n<thead><tr>{corner}{heads}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>\n{below}"
    )


def _swatch(style: Style) -> str:
    dash = "" if style.dash == "-" else ' stroke-dasharray="' + _dashes(style.dash) + '"'
    return (
        '<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true"><line x1="0" y1="5" x2="34" '
        f'y2="5" stroke="{style.colour}" stroke-width="3"{dash}/></svg> '
    )


def _dashes(dash: Any) -> str:
    return " ".join(str(2 * length) for length in dash[1])


def _section(name: str, charts: Sequence[Chart], images: str) -> str:
    mine = [chart for chart in charts if chart.section == name]
    if not mine:
        return ""
    figures = "\n".join(_figure(chart, images) for chart in mine)
    return f'<h2>{text(name)}</h2>\n<div class="charts">\n{figures}\n</div>'


def _figure(chart: Chart, images: str) -> str:
    file = text(f"{images}/{chart.name}.png")
    return (
        f'<figure id="{chart.name}">{chart.svg}<figcaption>{text(chart.note)} '
        f'<code>{text(chart.key)}</code> <a href="{file}">PNG</a></figcaption></figure>'
    )


def _constant(constant: Mapping[Panel, float]) -> str:
    if not constant:
        return ""
    rows = "".join(
        f"<li>{text(panel.title)}: {text(_plain(number))} <code>{text(panel.key)}</code></li>"
        for panel, number in constant.items()
    )
    return f"<h2>The same at every step, in every run</h2>\n<ul>{rows}</ul>"


def _plain(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.6g}"


def _samples(runs: Sequence[Run], shown: Sequence[Moment]) -> str:
    if not shown:
        return ""
    left_out = len(runs) - RUNS_SHOWN
    more = f" {left_out} further runs are left out." if left_out > 0 else ""
    lead = (
        '<p class="soft">The best and the worst completion of a group, by reward; prompts that '
        f"most runs asked come first.{more}</p>"
    )
    parts = [
        f"<h3>{text(moment.title)}</h3>\n" + "\n".join(_prompts(runs, moment)) for moment in shown
    ]
    return "\n".join(["<h2>Sample completions</h2>", lead, *parts])


def _prompts(runs: Sequence[Run], moment: Moment) -> list[str]:
    return [
        f'<details open><summary>Prompt</summary><pre class="prompt">{_cut(prompt)}</pre>\n'
        '<div class="side">'
        + "".join(f"<div>{_answers(run, one)}</div>" for run, one in zip(runs, held, strict=False))
        + "</div></details>"
        for prompt, held in moment.prompts.items()
    ]


def _answers(run: Run, held: Answers | None) -> str:
    name = f"<strong>{text(run.name)}</strong>"
    if held is None:
        return f'{name}<p class="soft">not asked in these steps</p>'
    judged = [reward for reward in held.rewards if reward is not None]
    mean = f"mean reward {sum(judged) / len(judged):.3f}" if judged else "not judged"
    group = f'<p class="facts">step {held.step}, {len(held.rewards)} completions, {mean}</p>'
    if held.best is held.worst:
        which = "the first" if not judged else "all equal; the first"
        return f"{name}{group}{_completion(which, held.best)}"
    best, worst = _completion("best", held.best), _completion("worst", held.worst)
    return f"{name}{group}{best}{worst}"


def _completion(which: str, one: Mapping[str, Any]) -> str:
    facts = [which, f"reward {one.get('reward')}"]
    facts += [f"{one['tokens']} tokens"] if "tokens" in one else []
    facts += ["cut off at the limit"] if one.get("finish_reason") == "length" else []
    return f'<p class="facts">{text(", ".join(facts))}</p><pre>{_cut(one["completion"])}</pre>'


def _cut(whole: str) -> str:
    more = len(whole) - MOST_CHARACTERS
    return text(whole[:MOST_CHARACTERS]) + (f"\n[{more:,} characters more]" if more > 0 else "")

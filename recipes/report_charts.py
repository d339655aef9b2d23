"""The report's charts by matplotlib: SVG that takes the page's text colour, and PNG.

Colours are those of Okabe and Ito (2008, "Color Universal Design"); runs differ in dash and marker
as well.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.report_panels import LAG, LEARNING, SPEED, Panel, lag_tokens, time_parts
from recipes.report_runs import Group, ReportError, Run, accuracies_of

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1)))
MARKERS = "osD^vPX"
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "++")
INK = "#1f2328"
SIZE, DPI = (5.0, 3.3), 160
MADE_BY = "zerokl report"
LONGEST_LABEL, HALF_A_LEGEND, LEGEND_ROW = 46, 22, 0.17
SMOOTH_FROM, MARKED_UP_TO = 20, 40
WIDE_RANGE, NEGLIGIBLE = 1000, 1e-6


@dataclass(frozen=True)
class Chart:
    """A drawn chart. alt: what it shows, in words. svg: an element for a page."""

    section: str
    name: str
    title: str
    key: str
    note: str
    alt: str
    svg: str
    png: bytes


@dataclass(frozen=True)
class Style:
    """How one group is told from the others."""

    colour: str
    dash: Any
    marker: str
    hatch: str


def styles(count: int) -> list[Style]:
    """One a group; the periods of colour, dash and marker differ, so that pairs do not return."""
    return [
        Style(
            COLOURS[i % len(COLOURS)],
            DASHES[i % len(DASHES)],
            MARKERS[i % len(MARKERS)],
            HATCHES[i % len(HATCHES)],
        )
        for i in range(count)
    ]


def short(label: str) -> str:
    """The label for a legend: without its middle where it is too long.

    Matplotlib leaves labels out that begin with an underscore.
    """
    label = f" {label}" if label.startswith("_") else label
    if len(label) <= LONGEST_LABEL:
        return label
    half = LONGEST_LABEL // 2
    return f"{label[: half - 1]}…{label[-half:]}"


def draw_all(groups: Sequence[Group], panels: Sequence[Panel]) -> list[Chart]:
    """Every chart for which the runs have numbers, in the order of the page.

    Raises ReportError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ReportError(f"no charts ({error}): pip install matplotlib") from error
    look: dict[Any, Any] = {"svg.hashsalt": "zerokl", "font.size": 9, "text.parse_math": False}
    look |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK)
    look |= {"xtick.color": INK, "ytick.color": INK, "hatch.linewidth": 0.6}
    with matplotlib.rc_context(look):
        over_steps = [_panel_chart(panel, groups) for panel in panels]
        extra = [*_accuracy_charts(groups), _lag_chart(groups), _time_chart(groups)]
        return [*over_steps, *(chart for chart in extra if chart is not None)]


def _chart(
    section: str,
    name: str,
    title: str,
    labels: tuple[str, str],
    draw: Callable[[Any], str],
    legend: bool,
    key: str = "",
    note: str = "",
) -> Chart:
    """A figure with one pair of axes, filled by `draw`, which says in words what it drew."""
    from matplotlib.figure import Figure  # no pyplot: it would choose a window system

    figure = Figure(figsize=SIZE, layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.set_facecolor("none")
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.grid(alpha=0.22, color=INK, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    words = draw(axes)
    if legend:
        _legend(figure, axes)
    alt = f"{title}; x: {labels[0]}, y: {labels[1]}. {words}"
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=DPI, metadata={"Software": MADE_BY, "Description": alt})
    figure.set_layout_engine("none")  # the layout found above serves both
    return Chart(section, name, title, key, note, alt, _svg(figure, name, alt), png.getvalue())


def _legend(figure: Any, axes: Any) -> None:
    """Below the axes, in one column where labels are long; the figure grows with its rows."""
    labels = axes.get_legend_handles_labels()[1]
    columns = 2 if all(len(label) <= HALF_A_LEGEND for label in labels) else 1
    rows = math.ceil(len(labels) / columns)
    figure.set_size_inches(SIZE[0], SIZE[1] + LEGEND_ROW * max(0, rows - 1))
    figure.legend(loc="outside lower left", ncols=columns, frameon=False, handlelength=3.2)


def _svg(figure: Any, name: str, alt: str) -> str:
    """The figure as an element without addresses, with ids of its own, text in currentColor."""
    from html import escape

    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    element = re.sub(r"<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)
    element = element[element.index("<svg") :].replace(INK, "currentColor")
    element = re.sub(r' xmlns(:\w+)?="[^"]*"', "", element)
    element = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", element)
    element = re.sub(r'^<svg[^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", element)
    return element.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)


def _panel_chart(panel: Panel, groups: Sequence[Group]) -> Chart:
    scale = 100.0 if panel.percent else 1.0
    spans = [_span(group, panel) for group in groups]
    window = max(spans, default=0) if panel.smooth else 0

    def draw(axes: Any) -> str:
        words = [
            _draw_group(axes, group, style, panel, scale, window)
            for group, style in zip(groups, styles(len(groups)), strict=True)
        ]
        _mend_axes(axes, [n * scale for g in groups for r in g.runs for n in r.values(panel.read)])
        return " ".join(filter(None, words))

    note = panel.note
    if window:
        note += f" Line: mean of the last {window} steps; faint: each step."
    labels = ("step", panel.unit)
    several = len(groups) > 1 or groups[0].is_band
    return _chart(
        panel.section, panel.name, panel.title, labels, draw, several, panel.key, note.strip()
    )


def _span(group: Group, panel: Panel) -> int:
    """Over how many steps to average; 0 for short runs."""
    longest = max((len(run.values(panel.read)) for run in group.runs), default=0)
    return max(3, longest // 12) if longest >= SMOOTH_FROM else 0


def _draw_group(axes, group: Group, style: Style, panel: Panel, scale: float, window: int) -> str:
    each = [
        {step: number * scale for step, number in run.points(panel.read).items()}
        for run in group.runs
    ]
    shared = [step for step in sorted(each[0]) if all(step in one for one in each)]
    if group.is_band or window:
        for one in each:
            axes.plot(*_xy(one), color=style.colour, linewidth=0.7, alpha=0.45)
    if group.is_band and shared:
        columns = [[one[step] for one in each] for step in shared]
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(shared, low, high, color=style.colour, alpha=0.18, linewidth=0)
    mean = {step: sum(one[step] for one in each) / len(each) for step in shared}
    line = _running_mean(mean, window) if window else mean
    marker = style.marker if len(line) <= MARKED_UP_TO else ""
    axes.plot(
        *_xy(line),
        color=style.colour,
        linestyle=style.dash,
        marker=marker,
        markersize=4,
        linewidth=1.7,
        label=short(group.label),
    )
    if not mean:
        return ""
    first, last = shared[0], shared[-1]
    ends = f"{mean[first]:.4g} at step {first}, {mean[last]:.4g} at step {last}"
    return f"{group.label}: {ends}."


def _xy(points: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(points), list(points.values())


def _running_mean(points: Mapping[int, float], window: int) -> dict[int, float]:
    numbers = list(points.values())
    parts = [numbers[max(0, end - window) : end] for end in range(1, len(numbers) + 1)]
    return {step: sum(part) / len(part) for step, part in zip(points, parts, strict=True)}


def _mend_axes(axes: Any, numbers: Sequence[float]) -> None:
    """Whole steps; all zeros said in words; a log scale, with its 0, for a wide range."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    sizes = [abs(number) for number in numbers if number]
    if not sizes:
        axes.set_ylim(-1, 1)
        axes.set_yticks([0], ["0"])
        _remark(axes, "exactly 0 at every step")
    elif max(numbers) - min(numbers) < NEGLIGIBLE * max(sizes):
        middle = max(numbers)
        axes.set_ylim(*sorted((0.98 * middle, 1.02 * middle)))
        _remark(axes, "changes by less than a millionth")
    elif min(numbers) >= 0 and max(sizes) > WIDE_RANGE * min(sizes):
        axes.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(min(sizes))))
        axes.yaxis.set_major_formatter(lambda number, _: f"{number:.0e}" if number else "0")
        axes.set_ylim(bottom=0)


def _remark(axes: Any, words: str) -> None:
    axes.text(0.5, 0.62, words, transform=axes.transAxes, ha="center")


def _accuracy_charts(groups: Sequence[Group]) -> list[Chart]:
    rows = [row for group in groups for run in group.runs for row in run.evaluations]
    kinds = dict.fromkeys(kind for row in rows for kind in accuracies_of(row))
    strict = [kind for kind in kinds if kind.endswith("strict")]
    return [_accuracy_chart(kind, groups) for kind in (strict or list(kinds))]


def _accuracy_chart(kind: str, groups: Sequence[Group]) -> Chart:
    runs = [(group, run) for group in groups for run in group.runs]
    reach = max((run.last_step for _, run in runs), default=1)
    counts = (row.get(f"eval/{kind}/n") for _, run in runs for row in run.evaluations)
    sizes = {count for count in counts if isinstance(count, int)}
    of_groups = dict(zip((g.label for g in groups), styles(len(groups)), strict=True))

    def draw(axes: Any) -> str:
        words = []
        for place, (group, run) in enumerate(runs):
            aside = (place - (len(runs) - 1) / 2) * 0.012 * max(reach, 1)
            label = short(group.label.split(" (mean")[0]) if run is group.runs[0] else None
            words.append(_draw_accuracy(axes, kind, run, of_groups[group.label], aside, label))
        axes.set_ylim(0, 100)
        return " ".join(filter(None, words))

    note = "Bars: 95% intervals"
    note += (
        f", n = {' and '.join(f'{size:,}' for size in sorted(sizes))} answers." if sizes else "."
    )
    note += " Runs are moved aside a little where there are several." if len(runs) > 1 else ""
    title = f"Held-out accuracy, {kind.replace('_', ', ')}"
    name = "accuracy_" + re.sub(r"\W", "_", kind)
    labels = ("step (0: before the first update)", "accuracy (%)")
    return _chart(LEARNING, name, title, labels, draw, len(runs) > 1, f"eval/{kind}", note)


def _draw_accuracy(axes, kind: str, run: Run, style: Style, aside: float, label) -> str:
    each = [(row["step"], accuracies_of(row).get(kind)) for row in run.evaluations]
    found = [(step, interval) for step, interval in each if interval is not None]
    if not found:
        return ""
    shares = [100 * share for _, (share, _, _) in found]
    below = [100 * max(0.0, share - low) for _, (share, low, _) in found]
    above = [100 * max(0.0, high - share) for _, (share, _, high) in found]
    axes.errorbar(
        [step + aside for step, _ in found],
        shares,
        yerr=[below, above],
        color=style.colour,
        linestyle=style.dash,
        marker=style.marker,
        markersize=4.5,
        linewidth=1.4,
        capsize=3,
        label=label,
    )
    (first, _), (last, _) = found[0], found[-1]
    return f"{run.name}: {shares[0]:.1f}% at step {first}, {shares[-1]:.1f}% at step {last}."


def _lag_chart(groups: Sequence[Group]) -> Chart | None:
    found = [lag_tokens(group) for group in groups]
    behind = sorted({lag for totals in found for lag in totals})
    if not any(tokens for totals in found for lag, tokens in totals.items() if lag):
        return None

    def draw(axes: Any) -> str:
        from matplotlib.ticker import MaxNLocator

        width, words = 0.8 / len(groups), []
        for place, (group, style, totals) in enumerate(
            zip(groups, styles(len(groups)), found, strict=True)
        ):
            whole = sum(totals.values())
            shares = [100 * totals.get(lag, 0) / whole if whole else 0.0 for lag in behind]
            at = [lag + (place - (len(groups) - 1) / 2) * width for lag in behind]
            look = {"color": style.colour, "hatch": style.hatch, "edgecolor": "white"}
            axes.bar(at, shares, width * 0.94, label=short(group.label), linewidth=0, **look)
            parts = (
                f"{share:.1f}% {lag} behind" for lag, share in zip(behind, shares, strict=True)
            )
            words.append(f"{group.label}, {whole:,.0f} tokens: {', '.join(parts)}.")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return " ".join(words)

    labels = ("policy versions behind when trained on", "share of tokens (%)")
    return _chart(
        LAG, "lag_histogram", "Lag of the tokens", labels, draw, len(groups) > 1,
        "lag/tokens/*", "Over all steps of the run.",
    )  # fmt: skip


def _time_chart(groups: Sequence[Group]) -> Chart | None:
    found = [time_parts(group) for group in groups]
    parts = dict.fromkeys(part for each in found for part in each)
    if not parts:
        return None

    def draw(axes: Any) -> str:
        at, left = list(range(len(groups))), [0.0] * len(groups)
        for part, style in zip(parts, styles(len(parts)), strict=True):
            seconds = [each.get(part, 0.0) for each in found]
            look = {"color": style.colour, "hatch": style.hatch, "edgecolor": "white"}
            axes.barh(at, seconds, 0.6, left=left, label=part, linewidth=0, **look)
            left = [start + more for start, more in zip(left, seconds, strict=True)]
        axes.set_yticks(at, [_folded(group.label) for group in groups])
        axes.invert_yaxis()
        words = (
            f"{group.label}: " + ", ".join(f"{part} {s:.3g} s" for part, s in each.items()) + "."
            for group, each in zip(groups, found, strict=True)
        )
        return " ".join(words)

    labels = ("seconds a step, mean over the steps", "run")
    return _chart(SPEED, "time_parts", "Where a step's time goes", labels, draw, True, "time/*")


def _folded(label: str) -> str:
    """On at most three lines of 16 characters."""
    import textwrap

    lines = textwrap.wrap(short(label), 16, max_lines=3, placeholder="…")
    return "\n".join(lines)

"""Four pictures of results.json. They can be drawn again from the file: plots.py RESULTS_DIR"""

import json
import sys
import textwrap
from pathlib import Path

import matplotlib

import report

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib import ticker  # noqa: E402

# Okabe and Ito: told apart by colour-blind readers; line style and marker say the same again.
STYLE = {
    "sparge int8": ("#D55E00", "-", "o"),
    "sparge int16": ("#E69F00", "-", "s"),
    "sparge fp32": ("#000000", "-", "D"),
    "torch fp32": ("#0072B2", "--", "^"),
    "torch bf16": ("#56B4E9", "--", "v"),
    "FlexAttention fp32": ("#009E73", "-.", "P"),
    "ONNX Runtime fp32": ("#CC79A7", "--", "X"),
    "OpenVINO fp32": ("#8A8000", ":", "<"),
    "ggml f16 K/V": ("#777777", ":", ">"),
}
STAGE_STYLE = {"pack": ("#56B4E9", ""), "predict": ("#009E73", "///"), "schedule": ("#CC79A7", "xxx"),
               "kernel": ("#E69F00", "")}
GROWTH_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73")


def draw_all(results, folder):
    """Draws what there are measurements for; returns the files."""
    files = []
    for name, draw in (("speed_length", draw_length), ("speed_kept", draw_kept), ("stages", draw_stages),
                       ("growth", draw_growth)):
        figure = draw(results)
        if figure is not None:
            path = Path(folder) / f"{name}.png"
            figure.savefig(path, dpi=140)
            plt.close(figure)
            files.append(path)
    return files


def sound(results, group):
    return [entry for entry in results["entries"]
            if entry["case"]["group"] == group and "time_ms" in entry and "wrong" not in entry]


def caption(figure, results, more=""):
    """Machine, versions and whoever is missing: a picture travels without its table."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if name != "flex")
    parts = [f"{results['machine']['cpu']}, {results['isa']}; {versions}; {results['date'][:10]}."]
    busy = {e["label"]: e.get("other_cpu", 0) > report.BUSY for e in results["entries"]}
    if any(busy.values()):
        parts.append(f"Other programs kept the machine busy during {sum(busy.values())} of {len(busy)} cases.")
    parts += [f"missing: {name}: {reason}." for name, reason in results["missing"].items()]
    lines = textwrap.wrap(" ".join([more, *parts]).strip(), int(16.5 * figure.get_figwidth()))
    figure.text(0.01, 0.01, "\n".join(lines), fontsize=7.5, color="#444444", va="bottom")
    figure.tight_layout(rect=(0, 0.03 + 0.025 * len(lines), 1, 1))


def panels(count, title, height=5.2, sharey=False):
    figure, axes = plt.subplots(1, count, figsize=(11 if count > 1 else 9, height), squeeze=False, sharey=sharey)
    figure.suptitle(title, fontsize=13, x=0.01, ha="left", weight="bold")
    for axis in axes[0]:
        axis.grid(True, which="major", color="#DDDDDD", linewidth=0.8)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return figure, axes[0]


def token_axis(axis, values):
    axis.set_xscale("log", base=2)
    ticks = sorted(set(values))
    axis.set_xticks(ticks, [f"{v // 1024}K" if v % 1024 == 0 else str(v) for v in ticks])
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.set_xlabel("tokens")


def plain_numbers(axis, which="y"):
    """10, 100, 1000 instead of powers, with 2 and 5 between where the range is short."""
    side = axis.yaxis if which == "y" else axis.xaxis
    side.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5)))
    side.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    side.set_minor_locator(ticker.NullLocator())


def line(axis, name, points):
    colour, dash, marker = STYLE[name]
    ours = name.startswith("sparge")
    axis.plot(*zip(*sorted(points)), dash, color=colour, marker=marker, label=name, markersize=6 if ours else 5,
              linewidth=2.4 if ours else 1.5, zorder=3 if ours else 2)


def most_threads(entries):
    threads = max(entry["case"]["threads"] for entry in entries)
    return threads, [entry for entry in entries if entry["case"]["threads"] == threads]


def draw_length(results):
    entries = sound(results, "dense")
    if not entries:
        return None
    threads, entries = most_threads(entries)
    dims = sorted({entry["case"]["dim"] for entry in entries})
    figure, axes = panels(len(dims), f"Dense attention: speed against length ({threads} threads)", sharey=True)
    for axis, dim in zip(axes, dims):
        mine = [entry for entry in entries if entry["case"]["dim"] == dim]
        for name in STYLE:
            points = [(e["case"]["queries"], e["gmacs"] / (e["time_ms"] / 1e3)) for e in mine if e["name"] == name]
            if points:
                line(axis, name, points)
        token_axis(axis, [e["case"]["queries"] for e in mine])
        axis.set_title(f"head size {dim}, {mine[0]['case']['heads']} heads", fontsize=10)
    axes[0].set_ylim(bottom=0)  # after all lines are there, or the panels would not agree on the top
    axes[0].set_ylabel("billion multiply-adds per second")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8.5, frameon=False)
    caption(figure, results, "Higher is better.")
    return figure


def draw_kept(results):
    entries = [entry for entry in sound(results, "kept") if "ratio" in entry]
    if not entries:
        return None
    threads, entries = most_threads(entries)
    tokens = max(entry["case"]["queries"] for entry in entries)
    entries = [entry for entry in entries if entry["case"]["queries"] == tokens]
    dims = sorted({entry["case"]["dim"] for entry in entries})
    title = f"Block-sparse attention: speed against kept tiles (N={tokens}, {threads} threads)"
    figure, axes = panels(len(dims), title, sharey=True)
    for axis, dim in zip(axes, dims):
        mine = [entry for entry in entries if entry["case"]["dim"] == dim]
        for name in STYLE:
            points = [(100 * e["case"]["kept"], e["ratio"]) for e in mine
                      if e["name"] == name and not e["dense_yardstick"]]
            if points:
                line(axis, name, points)
        axis.axhline(1, color=STYLE["torch fp32"][0], linestyle="--", linewidth=1.5, label="torch fp32, dense")
        axis.set_xscale("log")
        axis.set_yscale("log")
        shares = sorted({100 * e["case"]["kept"] for e in mine})
        axis.set_xticks(shares, [f"{share:g}" for share in shares])
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.invert_xaxis()  # sparser to the right, as speed grows
        plain_numbers(axis)
        axis.set_title(f"head size {dim}", fontsize=10)
        axis.set_xlabel("tiles kept, % (random map of 128 x 64 tiles)")
    axes[0].set_ylabel("times as fast as dense torch fp32")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8.5, frameon=False)
    caption(figure, results, "Higher is better. FlexAttention computes the same tiles; other peers take no map.")
    return figure


def draw_stages(results):
    """One bar per kind of case, our int8, one thread where measured: with several, stages would share the noise."""
    rows = []
    for group in ("dense", "causal", "kept", "short", "decode"):
        entries = [e for e in sound(results, group) if e["name"] == "sparge int8" and e.get("stages_ms")]
        if not entries:
            continue
        threads = min(e["case"]["threads"] for e in entries)
        dim = min(e["case"]["dim"] for e in entries)
        entries = [e for e in entries if e["case"]["threads"] == threads and e["case"]["dim"] == dim]
        longest = max(e["case"]["queries"] for e in entries)
        rows += [e for e in entries if group == "short" or e["case"]["queries"] == longest]
    if not rows:
        return None
    figure, (axis,) = panels(1, "Where the time goes: stages of sparge int8", 1.8 + 0.42 * len(rows))
    labels = []
    for position, entry in enumerate(reversed(rows)):
        total, left = sum(entry["stages_ms"].values()), 0.0
        for stage, (colour, hatch) in STAGE_STYLE.items():
            share = 100 * entry["stages_ms"][stage] / total
            axis.barh(position, share, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5,
                      label=stage if position == 0 else None)
            if share >= 6:
                axis.text(left + share / 2, position, f"{share:.0f} %", ha="center", va="center", fontsize=8,
                          bbox={"boxstyle": "round,pad=0.15", "facecolor": colour, "edgecolor": "none"})
            left += share
        axis.text(101, position, f"{total:.3g} ms", va="center", fontsize=8.5)
        labels.append(entry["label"].replace(" heads=", ", heads ").replace(" threads=", ", threads "))
    axis.set_yticks(range(len(rows)), labels, fontsize=8.5)
    axis.set_xlim(0, 100)
    axis.grid(False)
    axis.set_xlabel("share of the time of one run, %")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=8.5, frameon=False)
    caption(figure, results)
    return figure


def draw_growth(results):
    growth = [item for item in results["growth"] if "time_ms" in item]
    if not growth:
        return None
    figure, (left, right) = panels(2, f"Growth with length: sparge, one head of size {growth[0]['dim']}, "
                                      f"{growth[0]['threads']} threads")
    kinds = list(dict.fromkeys(item["kind"] for item in growth))
    for kind, colour, marker in zip(kinds, GROWTH_COLOURS, "Dos^"):
        mine = [item for item in growth if item["kind"] == kind]
        left.plot([item["tokens"] for item in mine], [item["time_ms"] for item in mine], color=colour, marker=marker,
                  label=kind)
    # All int8 kinds need about the same memory, so one of them stands for the rest.
    for kind, colour, marker in ((kinds[0], GROWTH_COLOURS[0], "D"), (kinds[-1], GROWTH_COLOURS[3], "^")):
        draw_memory(right, [item for item in growth if item["kind"] == kind], colour, marker)
    for axis in (left, right):
        token_axis(axis, [item["tokens"] for item in growth])
        axis.set_yscale("log")
        axis.legend(fontsize=8.5, frameon=False, loc="upper left")
        low, high = axis.get_ylim()
        axis.set_ylim(low, high * (high / low) ** 0.15)  # room for the legend
    left.yaxis.set_major_locator(ticker.LogLocator(base=10))
    left.yaxis.set_major_formatter(
        ticker.FuncFormatter(lambda ms, _: f"{ms:g} ms" if ms < 1000 else f"{ms / 1000:g} s"))
    left.yaxis.set_minor_locator(ticker.NullLocator())
    plain_numbers(right)
    left.set_ylabel("time of one run")
    left.set_title("time (selection by prediction included)", fontsize=10)
    right.set_ylabel("MiB")
    right.set_title("memory", fontsize=10)
    caption(figure, results)
    return figure


def draw_memory(axis, items, colour, marker):
    tokens = [item["tokens"] for item in items]
    axis.plot(tokens, [item["workspace_bytes"] / 2**20 for item in items], color=colour, marker=marker,
              label=f"workspace, {items[0]['kind']}")
    axis.plot(tokens, [item["peak_growth_bytes"] / 2**20 for item in items], ":", color=colour, marker=marker,
              markerfacecolor="white", label=f"peak RSS growth, {items[0]['kind']}")
    if items[0]["kind"].endswith("fp32"):  # the inputs are the same for all
        axis.plot(tokens, [item["input_bytes"] / 2**20 for item in items], "--", color="#888888",
                  label="q, k and v (fp32)")


if __name__ == "__main__":
    home = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for file in draw_all(json.loads((home / "results.json").read_text()), home):
        print(file)

"""Table and picture of bench/prompt.py, from its results; prompt_report.py FOLDER draws them again."""

import json
import math
import sys
import textwrap
from pathlib import Path

import report

# Okabe and Ito: told apart by colour-blind readers; markers say the same again.
STYLE = {
    "llama.cpp -fa off": ("#777777", "v"),
    "llama.cpp -fa on": ("#000000", "^"),
    "llama.cpp with sparge": ("#D55E00", "o"),
    "ik_llama.cpp": ("#8A8000", "<"),
    "OpenVINO dense": ("#009E73", "s"),
    "OpenVINO XAttention .95": ("#009E73", "P"),
    "OpenVINO XAttention .9": ("#009E73", "X"),
    "OpenVINO with sparge": ("#8B4513", "o"),
    "transformers sdpa fp32": ("#0072B2", "s"),
    "transformers with sparge fp32": ("#E69F00", "o"),
    "transformers sdpa bf16": ("#56B4E9", "s"),
    "transformers with sparge bf16": ("#CC79A7", "o"),
}


def speeds(entry):
    """Tokens per second of the first prompt and of later ones: the best of all processes, or None."""
    runs = entry.get("time")
    if not runs:
        return None, None
    later = [seconds for run in runs for seconds in run[1:]]
    return entry["tokens"] / min(run[0] for run in runs), entry["tokens"] / min(later) if later else None


def perplexities(entry):
    """Of the first prompt and of the next, which is the same where nothing is learnt."""
    losses = entry.get("loss", [[]])[0]
    values = [math.exp(loss) for loss in losses]
    return (values[0], values[-1]) if values else (None, None)


def yardstick(entry, entries):
    """Tokens per second and perplexity of what computes all attention in the same program: of the faster, where there are two."""
    mine = [e for e in entries if e["dense"] == entry["dense"] and e["tokens"] == entry["tokens"] and e["weights"] == entry["weights"]
            and (e["name"] == e["dense"] or "-fa" in e["name"])]
    speed = max((max(filter(None, speeds(e))) for e in mine if any(speeds(e))), default=None)
    return speed, next((perplexities(e)[0] for e in reversed(mine) if perplexities(e)[0]), None)


def cell(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"


def marked(entry, verb, value, notes):
    """A cell, or why there is nothing in it."""
    reason = entry.get("missing", {}).get(verb)
    return "missing " + notes.mark(f"{entry['name']}: {verb}: {reason}") if value == "-" and reason else value


def row(entry, entries, notes):
    (first, later), (loss, next_loss), (speed, dense) = speeds(entry), perplexities(entry), yardstick(entry, entries)
    times = [f"{value / speed:.2f}x" if value and speed else "-" for value in (first, later)]
    change = f"{100 * (loss / dense - 1):+.2f} %" if loss and dense else "-"
    speed, perplexity = marked(entry, "time", cell(first, 0), notes), marked(entry, "loss", cell(loss, 3), notes)
    return [entry["name"], speed, times[0], cell(later, 0), times[1], perplexity, cell(next_loss, 3), change]


def groups(results):
    keys = dict.fromkeys((entry["weights"], entry["tokens"]) for entry in results["entries"])
    return [(key, [e for e in results["entries"] if (e["weights"], e["tokens"]) == key]) for key in keys]


def text(results):
    lines = [f"{results['model']}, prompts of {results['text']}, {results['threads']} threads, {results['machine']['cpu']}", ""]
    header = ["", "first prompt, tokens/s", "", "later", "", "perplexity", "later", "against dense"]
    notes = report.Notes()
    for (weights, tokens), entries in groups(results):
        lines += [f"{weights}, {tokens} tokens:", "", report.table(header, [row(e, entries, notes) for e in entries]), ""]
    lines += ["x: against the fastest that computes all attention in the same program. Perplexity: of the second half."]
    lines += notes.lines() + ["", *(f"`{command}`" for command in dict.fromkeys(results["commands"]))]
    return "\n".join(lines) + "\n"


def draw_group(axis, title, entries):
    for entry in entries:
        points = [(p, s) for p, s in zip(perplexities(entry), speeds(entry)) if p and s]
        if not points:
            continue
        colour, marker = STYLE[entry["name"]]
        ours = "sparge" in entry["name"]
        # Hollow is the first prompt, full the later ones; where nothing is learnt they are one.
        if ours and len(points) > 1:
            axis.plot(*zip(*points), "-", color=colour, linewidth=1.2, zorder=3)
            axis.plot(*points[0], marker, color=colour, markersize=9, markerfacecolor="white", zorder=4)
        best = points[-1] if ours else (points[0][0], max(speed for _, speed in points))
        axis.plot(*best, marker, color=colour, markersize=9, label=entry["name"], linestyle="none", zorder=4)
    axis.set_title(title, fontsize=10)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("perplexity")
    axis.margins(x=0.12, y=0.12)


def draw(results, folder):
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    import plots

    found = groups(results)
    figure, axes = plots.panels(len(found), "Whole prompts: speed against perplexity (up and to the left is better)")
    for axis, ((weights, tokens), entries) in zip(axes, found):
        draw_group(axis, f"{weights}, {tokens} tokens", entries)
    axes[0].set_ylabel("tokens per second")
    handles = dict(pair[::-1] for axis in axes for pair in zip(*axis.get_legend_handles_labels()))
    axes[-1].legend(handles.values(), handles, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8.5, frameon=False)
    note = (f"{results['model']}, {results['text']}, {results['threads']} threads, {results['machine']['cpu']}. Hollow: sparge's first prompt of "
            "a program, before it knows the model; full: later ones. Perplexity is that of a prompt's second half.")
    lines = textwrap.wrap(note, int(16.5 * figure.get_figwidth()))
    figure.text(0.01, 0.01, "\n".join(lines), fontsize=7.5, color="#444444", va="bottom")
    figure.tight_layout(rect=(0, 0.02 + 0.025 * len(lines), 1, 1))
    path = Path(folder) / "prompt.png"
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path


def main():
    folder = Path(sys.argv[1])
    results = json.loads((folder / "prompt.json").read_text("utf-8"))
    report.write_whole(folder / "prompt.md", text(results))
    print(draw(results, folder))


if __name__ == "__main__":
    main()

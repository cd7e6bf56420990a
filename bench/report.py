"""Writes what was measured: a table for people (stdout and results.md) and results.json for programs."""

import json
import os
import platform
import tempfile
from pathlib import Path

import cases

BUSY = 0.15  # cores; above this, somebody else was measured, too


def machine():
    model = platform.processor()
    try:
        with open("/proc/cpuinfo") as info:
            lines = dict(line.split(":", 1) for line in info if ":" in line)
        fields = {key.strip(): value.strip() for key, value in lines.items()}
        model = fields.get("model name", model)
        if "cpu family" in fields:
            model += f" (family {fields['cpu family']}, model {fields['model']})"
    except OSError:
        pass
    return {"name": platform.node(), "cpu": model, "cores": os.cpu_count(), "system": platform.platform(),
            "python": platform.python_version()}


def write_whole(path, text):
    """The file appears whole or not at all, also if the run is killed."""
    path = Path(path)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def write_json(results, path):
    write_whole(path, json.dumps(results, indent=1, allow_nan=False) + "\n")


def number(value):
    """Three digits that matter."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def table(header, rows):
    """A Markdown table that is also aligned as plain text: first column left, the others right."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]

    def line(row):
        cells = [str(cell).ljust(width) if i == 0 else str(cell).rjust(width)
                 for i, (cell, width) in enumerate(zip(row, widths))]
        return "| " + " | ".join(cells) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


class Notes:
    """Reasons below a table; the cells hold their numbers."""

    def __init__(self):
        self.texts = []

    def mark(self, text):
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"

    def lines(self):
        return [f"[{i}] {text}" for i, text in enumerate(self.texts, 1)]


def cell(entry, notes):
    if entry is None:
        return "-"
    if "time_ms" not in entry:
        return "missing " + notes.mark(f"missing: {entry.get('missing', 'not measured')}")
    text = number(entry["time_ms"])
    if "ratio" in entry:
        text += f" ({number(entry['ratio'])}x)"
    if entry.get("dense_yardstick"):
        text += "*"
    if "wrong" in entry:
        text += " wrong " + notes.mark(f"{entry['name']}: wrong result: {entry['wrong']}")
    return text


def group_table(group, entries):
    """Rows are cases, columns contestants; a cell is milliseconds and the ratio to the yardstick."""
    labels = list(dict.fromkeys(entry["label"] for entry in entries))
    fullest = max(labels, key=lambda label: sum(entry["label"] == label for entry in entries))  # it gives the order
    names = list(dict.fromkeys(e["name"] for e in sorted(entries, key=lambda e: e["label"] != fullest)))
    found = {(entry["label"], entry["name"]): entry for entry in entries}
    notes = Notes()
    busy = {entry["label"]: entry.get("other_cpu", 0.0) for entry in entries}

    def title(label):
        mark = notes.mark("other programs kept the machine busy meanwhile: repeat") if busy[label] > BUSY else ""
        return f"{label} {mark}".strip()

    rows = [[title(label), *(cell(found.get((label, name)), notes) for name in names)] for label in labels]
    lines = [f"## {group}: {cases.GROUPS[group]}", "", table(["ms (times as fast as torch fp32)", *names], rows), ""]
    if any(entry.get("dense_yardstick") for entry in entries):
        lines.append("\\* takes no block map and computed every tile: a yardstick.")
    return "\n".join(lines + [line + "  " for line in notes.lines()] + [""]).replace("\n\n\n", "\n\n")


def errors_table(entries):
    """The largest error of each contestant over all cases, and whether its threads slept afterwards."""
    rows = []
    for name in dict.fromkeys(entry["name"] for entry in entries):
        mine = [entry for entry in entries if entry["name"] == name and "error" in entry]
        if mine:
            worst = max(mine, key=lambda entry: entry["error"])
            idle = max(entry["idle_cpu"] for entry in mine)
            rows.append([name, f"{worst['error']:.1e}", f"{worst['error_bound']:g}",
                         "wrong" if any("wrong" in e for e in mine) else "ok", f"{idle:.2f}"])
    header = ["relative L1 against float64, worst case", "error", "bound", "verdict", "cores busy when idle"]
    return "\n".join(["## Errors", "", table(header, rows), ""])


def bars_table(bars):
    rows = []
    for item in bars:
        figures = ", ".join(f"{value:.2f} ({threads} thr.)" for threads, value in sorted(item["measured"].items()))
        if figures:  # a run that was narrowed down measures few of them; the rest is counted below
            required = f"{'<=' if item['at_most'] else '>='} {item['required']:.2f}"
            verdict = item["verdict"] + (" (busy machine)" if item["busy"] else "")
            rows.append([f"{item['bar']}, d={item['dim']}", required, figures, item["tokens"], verdict])
    count = {word: sum(item["verdict"] == word for item in bars) for word in ("reached", "missed", "not measured")}
    lines = ["## Bars", ""]
    if rows:
        lines += [table(["bar", "required", "measured", "N", "verdict"], rows), ""]
    lines.append(", ".join(f"{number} {word}" for word, number in count.items())
                 + f", {len(bars) - sum(count.values())} measured at another length.")
    return "\n".join(lines + [""])


def growth_row(item):
    title = f"{item['kind']}, N={item['tokens']}"
    if "missing" in item:
        return [title, f"missing: {item['missing']}", *["-"] * 6]
    sizes = ("workspace_bytes", "peak_growth_bytes", "output_bytes", "input_bytes")
    return [title, number(item["time_ms"]), number(item["stages_ms"]["predict"]), f"{item['kept']:.3f}",
            *(number(item[size] / 2**20) for size in sizes)]


def growth_table(growth):
    rows = [growth_row(item) for item in growth]
    header = ["sparge, one head", "ms", "of it predict", "kept", "workspace MiB", "peak RSS growth MiB", "output MiB",
              "q+k+v MiB"]
    first = growth[0]
    return "\n".join([f"## Growth: d={first['dim']}, {first['threads']} threads, selection by prediction (top-k)", "",
                      table(header, rows), "",
                      "Peak RSS growth: what plan, workspace, output and run add to a process with q, k and v.", ""])


def text(results):
    entries = results["entries"]
    parts = [heading(results)]
    for group in cases.GROUPS:
        mine = [entry for entry in entries if entry["case"]["group"] == group]
        if mine:
            parts.append(group_table(group, mine))
    if results["growth"]:
        parts.append(growth_table(results["growth"]))
    if entries:
        parts += [errors_table(entries), bars_table(results["bars"])]
    return "\n".join(parts)


def heading(results):
    here = results["machine"]
    lines = ["# sparge beside its peers", "",
             f"Machine: {here['cpu']}, {here['cores']} cores, {here['system']}. Instruction set: {results['isa']}.",
             "Versions: " + ", ".join(f"{name} {version}" for name, version in results["versions"].items()) + ".",
             f"Command: `{results['command']}`, {results['date']}.",
             "Time: least of several rounds in turn. Ratio: time of torch fp32 in the same rounds / time."]
    if results.get("interrupted"):
        lines.append("The run was interrupted: this is what was measured until then.")
    lines += [f"missing: {name}: {reason}" for name, reason in results["missing"].items()]
    return "\n\n".join(lines[:1]) + "\n\n" + "  \n".join(lines[2:]) + "\n"

"""The bars this library has to reach, judged from measurements."""

from report import BUSY

BAR_TOKENS = 8192
SPEED = (  # what, case group, kept share, contestant, least ratio to torch fp32 at head size 64 and 128
    ("dense fp32", "dense", 1.0, "sparge fp32", {64: 1.12, 128: 1.05}),
    ("dense int16", "dense", 1.0, "sparge int16", {64: 1.6, 128: 1.6}),
    ("dense int8", "dense", 1.0, "sparge int8", {64: 2.8, 128: 2.7}),
    ("causal int8", "causal", 1.0, "sparge int8", {64: 2.9, 128: 2.9}),
    ("50 % kept, int8", "kept", 0.5, "sparge int8", {64: 5.2, 128: 5.2}),
    ("10 % kept, int8", "kept", 0.1, "sparge int8", {64: 20.0, 128: 20.0}),
)
SCALING_PER_THREAD = 0.95  # two threads: 1.9 times one
SLOWER_INPUT = 1.03
EFFICIENCY = 0.75


def judge(entries):
    """One dict per bar: bar, dim, required, measured {threads: value}, tokens, verdict; busy = other programs ran."""
    sound = [entry for entry in entries if "time_ms" in entry and "wrong" not in entry]
    found = []
    for group, judge_group in (("speed", speed_bars), ("scaling", scaling_bars), ("inputs", input_bars),
                               ("dims", dim_bars)):
        for item in judge_group(sound):
            groups = ("dense", "causal", "kept") if group == "speed" else (group,)
            item["busy"] = any(entry.get("other_cpu", 0) > BUSY and entry["case"]["group"] in groups
                               and entry["case"]["dim"] == item["dim"] and entry["case"]["queries"] == item["tokens"]
                               for entry in sound)
            found.append(item)
    return found


def pick(entries, **wanted):
    def fits(entry):
        return all((entry[key] if key in entry else entry["case"][key]) == value for key, value in wanted.items())

    return [entry for entry in entries if fits(entry)]


def longest(entries):
    tokens = max((entry["case"]["queries"] for entry in entries), default=None)
    return tokens, [entry for entry in entries if entry["case"]["queries"] == tokens]


def bar(name, dim, required, measured, tokens, at_most=False, any_length=False):
    """A verdict counts at the length of the bar only; at other lengths the figure is shown without one."""
    if not measured:
        verdict = "not measured"
    elif not any_length and tokens != BAR_TOKENS:
        verdict = f"no verdict: N={tokens}, the bar is for N={BAR_TOKENS}"
    else:
        good = all(value <= required if at_most else value >= required for value in measured.values())
        verdict = "reached" if good else "missed"
    return {"bar": name, "dim": dim, "required": required, "at_most": at_most, "measured": measured, "tokens": tokens,
            "verdict": verdict}


def speed_bars(entries):
    result = []
    for name, group, kept, who, required in SPEED:
        for dim, least in required.items():
            tokens, found = longest([entry for entry in pick(entries, group=group, kept=kept, name=who, dim=dim)
                                     if "ratio" in entry])
            measured = {entry["threads"]: entry["ratio"] for entry in found}
            result.append(bar(name, dim, least, measured, tokens))
    return result


def scaling_bars(entries):
    result = []
    for mode in ("fp32", "int8"):
        for dim in (64, 128):
            tokens, found = longest([entry for entry in pick(entries, group="scaling", dim=dim)
                                     if entry["name"].startswith(f"sparge {mode}")])
            times = {entry["threads"]: entry["time_ms"] for entry in found}
            most = max(times, default=1)
            measured = {most: times[1] / times[most]} if most > 1 and 1 in times else {}
            count = most if measured else 2
            name = f"{count} threads against one, {mode}"
            result.append(bar(name, dim, SCALING_PER_THREAD * count, measured, tokens))
    return result


def input_bars(entries):
    result = []
    for mode in ("fp32", "int8"):
        for dtype in ("f16", "bf16"):
            for dim in (64, 128):
                tokens, found = longest(pick(entries, group="inputs", dim=dim))
                plain = {e["threads"]: e["time_ms"] for e in found if e["name"] == f"sparge {mode}"}
                short = {e["threads"]: e["time_ms"] for e in found if e["name"] == f"sparge {mode}, {dtype} input"}
                measured = {count: short[count] / plain[count] for count in plain if count in short}
                result.append(bar(f"{dtype} input, time against f32, {mode}", dim, SLOWER_INPUT, measured, tokens,
                                  at_most=True))
    return result


def dim_bars(entries):
    """Efficiency = multiply-adds per second; sizes below 128 are compared with 64, those above with 128."""
    result = []
    for mode in ("fp32", "int8"):
        found = pick(entries, group="dims", name=f"sparge {mode}")
        tokens = found[0]["case"]["queries"] if found else None
        rate = {(e["case"]["dim"], e["threads"]): e["case"]["dim"] / e["time_ms"] for e in found}
        for dim in (40, 72, 80, 96, 160, 256):
            base = 64 if dim < 128 else 128
            measured = {count: rate[size, count] / rate[base, count] for size, count in rate
                        if size == dim and (base, count) in rate}
            name = f"efficiency against d={base}, {mode}"
            result.append(bar(name, dim, EFFICIENCY, measured, tokens, any_length=True))
    return result
